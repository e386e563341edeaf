//! The companion binary.
fn main() {}
