//! Stage 10: the life of a kernel struct.

#![allow(dead_code)]

mod calls;
mod decode;
mod folded;
mod html;
mod json;
mod model;
mod perfetto;

fn main() {}
