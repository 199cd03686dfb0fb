//! Stage 10: the life of a kernel struct.

#![allow(dead_code)]

mod decode;
mod model;

fn main() {}
