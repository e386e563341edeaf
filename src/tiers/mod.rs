//! Where pages go that have no frame: byte-level storage that knows nothing of devices.

#[allow(dead_code, reason = "no tier hands out slots yet")]
pub(crate) mod extents;
pub mod file;
