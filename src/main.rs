//! The `emberflow` binary.

fn main() {}
