//! Stage 10: the life of a kernel struct.

mod model;

fn main() {}
