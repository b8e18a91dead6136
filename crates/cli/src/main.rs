//! The command line of tilewise.

fn main() {}
