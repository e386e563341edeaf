//! Host memory that the device moves page records to and from by itself.

use super::ops::{Arena, on_device};
use super::params::Move;
use super::{Caps, DeviceId};
use crate::record::Record;
use crate::{Error, Result};
use std::fmt;

/// A handle to host memory that pages swap to; clones name the same memory.
pub trait HostMemory: Clone + fmt::Debug + Send + Sync + 'static {
    /// Its size.
    fn bytes(&self) -> u64;
    /// The device that reaches it.
    fn device(&self) -> DeviceId;
    /// Its bytes, where the host reaches them as memory of its own and this is the only handle; else `None`. Device work on
    /// them must have [finished](super::Backend::finish).
    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        None
    }
}

/// Who reaches a piece of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HostUse {
    /// The device alone: the fastest kind there is.
    Device,
    /// The device, and the host through [`read_host`](super::Backend::read_host) and
    /// [`write_host`](super::Backend::write_host).
    Shared,
}

/// Moves whole records between frames and host memory, where record `i` starts `offset + i × stride` bytes in.
///
/// `swap_out` reads frames ([`Move::from`]) and writes host records ([`Move::to`]), `swap_in` the reverse.
#[derive(Debug)]
pub struct Swap<'a, Buf, Host> {
    /// The layout of the pages.
    pub record: Record,
    /// The frames.
    pub arena: Arena<'a, Buf>,
    /// The host memory.
    pub host: &'a Host,
    /// Bytes before record 0, a multiple of 256.
    pub offset: u64,
    /// Bytes from one record to the next, a multiple of 256 and no less than the record.
    pub stride: u64,
    /// Which. No destination is named twice.
    pub moves: &'a [Move],
}

impl<Buf: super::DeviceBuffer, Host: HostMemory> Swap<'_, Buf, Host> {
    /// Bytes from the start of the host memory to host record `index`.
    pub(crate) fn host_offset(&self, index: u32) -> u64 {
        self.offset + u64::from(index) * self.stride
    }

    /// Checks ranges and devices of a `swap_out` (`out`) or a `swap_in`.
    pub fn validate(&self, out: bool, caps: &Caps) -> Result<()> {
        self.record.geometry().validate()?;
        self.arena.validate(caps)?;
        if self.host.device() != caps.device {
            return Err(Error::WrongDevice { what: "host memory" });
        }
        self.arena.slabs.iter().try_for_each(|slab| on_device(slab, "a slab", caps))?;
        if self.stride < self.record.bytes() {
            return Err(Error::Shape { what: "the record stride", got: self.stride, expected: self.record.bytes() });
        }
        if let Some(value) = [self.offset, self.stride].into_iter().find(|n| !n.is_multiple_of(256)) {
            return Err(Error::Misaligned { what: "host records", value, multiple: 256 });
        }
        for (frame, index) in self.moves.iter().map(|one| sides(one, out)) {
            self.arena.validate_frame(frame, &self.record)?;
            let end = u64::from(index).checked_mul(self.stride);
            let end = end.and_then(|n| n.checked_add(self.offset)?.checked_add(self.record.bytes()));
            match end {
                Some(end) if end <= self.host.bytes() => {}
                end => {
                    let end = end.unwrap_or(u64::MAX);
                    return Err(Error::OutOfBounds { what: "a host record", end, bytes: self.host.bytes() });
                }
            }
        }
        Ok(())
    }
}

/// Frame and host record of a move of a `swap_out` (`out`) or a `swap_in`.
pub(crate) const fn sides(one: &Move, out: bool) -> (u32, u32) {
    if out { (one.from, one.to) } else { (one.to, one.from) }
}

/// The moves in the order of their host records. They are independent, so any order is right.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) fn by_host(moves: &[Move], out: bool) -> Vec<Move> {
    let mut moves = moves.to_vec();
    moves.sort_unstable_by_key(|one| sides(one, out).1);
    moves
}

/// Checks that a byte range lies in host memory of this device.
pub(crate) fn host_range<Host: HostMemory>(host: &Host, offset: u64, bytes: usize, caps: &Caps) -> Result<()> {
    if host.device() != caps.device {
        return Err(Error::WrongDevice { what: "host memory" });
    }
    if let Some(value) = [offset, bytes as u64].into_iter().find(|n| !n.is_multiple_of(4)) {
        return Err(Error::Misaligned { what: "a range of host memory", value, multiple: 4 });
    }
    match offset.checked_add(bytes as u64) {
        Some(end) if end <= host.bytes() => Ok(()),
        end => {
            let end = end.unwrap_or(u64::MAX);
            Err(Error::OutOfBounds { what: "a range of host memory", end, bytes: host.bytes() })
        }
    }
}
