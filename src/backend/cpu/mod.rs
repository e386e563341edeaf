//! The reference backend: plain loops over host memory, always there.
//!
//! Work is done when the call returns, so streams and events carry nothing.

mod append;
mod attend;
mod channels;
mod host;
mod memory;
mod predict;
mod transfer;

pub use host::CpuHost;
pub use memory::CpuBuffer;

use super::ops::{
    Append, Attend, Fold, Merge, Project, Score, Transfer, also_project, check_sum, copy_sides, on_device, range,
};
use super::{Backend, Caps, DeviceId, HostUse, Operation, Swap, host_range};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// The CPU as a device.
#[derive(Debug, Clone)]
pub struct CpuBackend {
    caps: Arc<Caps>,
}

/// A stream of the CPU: nothing is ever pending on it.
#[derive(Debug)]
pub struct CpuStream;

/// An event of the CPU: always over.
#[derive(Debug, Clone)]
pub struct CpuEvent;

impl CpuBackend {
    /// A new device; buffers of one `CpuBackend` (and its clones) are refused by another.
    pub fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let caps = Caps {
            backend: "cpu",
            adapter: format!("{} ({threads} threads)", std::env::consts::ARCH),
            device: DeviceId::unique(),
            max_slabs: 64,
            max_slab_bytes: 1 << 40,
            max_channels: ("memory", 1 << 40),
            memory_bytes: None,
            query_tile: 32,
            at_once: 4 * threads,
            prefill: |_, _| None,
            overlap: false,
            formats: Operation::formats,
            limits: vec![("threads", threads)],
        };
        CpuBackend { caps: Arc::new(caps) }
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for CpuBackend {
    type Buffer = CpuBuffer;
    type Stream = CpuStream;
    type Event = CpuEvent;
    type Host = CpuHost;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<CpuBuffer> {
        let full = || Error::OutOfMemory { backend: "cpu", bytes, purpose: label.to_owned() };
        CpuBuffer::zeroed(self.caps.device, bytes).ok_or_else(full)
    }

    fn stream(&self) -> Result<CpuStream> {
        Ok(CpuStream)
    }

    fn upload(&self, _: &mut CpuStream, dst: &CpuBuffer, offset: u64, data: &[u8]) -> Result<()> {
        range(dst, offset, data.len() as u64, "an upload", &self.caps)?;
        dst.write(offset, data);
        Ok(())
    }

    fn download(&self, _: &mut CpuStream, src: &CpuBuffer, offset: u64, out: &mut [u8]) -> Result<()> {
        range(src, offset, out.len() as u64, "a download", &self.caps)?;
        src.read(offset, out);
        Ok(())
    }

    fn copy(&self, _: &mut CpuStream, src: (&CpuBuffer, u64), dst: (&CpuBuffer, u64), bytes: u64) -> Result<()> {
        copy_sides(src, dst, bytes, &self.caps)?;
        memory::copy_words((src.0, src.1 / 4), (dst.0, dst.1 / 4), bytes / 4);
        Ok(())
    }

    fn fill(&self, _: &mut CpuStream, dst: &CpuBuffer, offset: u64, bytes: u64, word: u32) -> Result<()> {
        range(dst, offset, bytes, "a fill", &self.caps)?;
        (offset / 4..(offset + bytes) / 4).for_each(|at| dst.set(at, word));
        Ok(())
    }

    fn sum(&self, _: &mut CpuStream, src: &CpuBuffer, bytes: u64, total: &CpuBuffer) -> Result<()> {
        check_sum(src, bytes, total, &self.caps)?;
        total.add(0, (0..bytes / 4).fold(0, |sum, at| sum.wrapping_add(src.get(at))));
        Ok(())
    }

    fn record(&self, _: &mut CpuStream) -> Result<CpuEvent> {
        Ok(CpuEvent)
    }

    fn wait(&self, _: &mut CpuStream, _: &CpuEvent) -> Result<()> {
        Ok(())
    }

    fn is_done(&self, _: &CpuEvent) -> Result<bool> {
        Ok(true)
    }

    fn finish(&self, _: &CpuEvent) -> Result<()> {
        Ok(())
    }

    fn elapsed(&self, _: &CpuEvent, _: &CpuEvent) -> Result<Option<Duration>> {
        Ok(None)
    }

    fn alloc_host(&self, label: &str, bytes: u64, _: HostUse) -> Result<CpuHost> {
        let full = || Error::OutOfMemory { backend: "cpu", bytes, purpose: format!("host memory: {label}") };
        CpuHost::zeroed(self.caps.device, bytes).ok_or_else(full)
    }

    fn read_host(&self, host: &CpuHost, offset: u64, out: &mut [u8]) -> Result<()> {
        host_range(host, offset, out.len(), &self.caps)?;
        host.read(offset, out);
        Ok(())
    }

    fn write_host(&self, host: &CpuHost, offset: u64, data: &[u8]) -> Result<()> {
        host_range(host, offset, data.len(), &self.caps)?;
        host.write(offset, data);
        Ok(())
    }

    fn swap_out(&self, _: &mut CpuStream, args: &Swap<'_, CpuBuffer, CpuHost>) -> Result<()> {
        args.validate(true, &self.caps)?;
        host::swap_out(args);
        Ok(())
    }

    fn swap_in(&self, _: &mut CpuStream, args: &Swap<'_, CpuBuffer, CpuHost>) -> Result<()> {
        args.validate(false, &self.caps)?;
        host::swap_in(args);
        Ok(())
    }

    fn flush(&self, _: &mut CpuStream) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self, _: &mut CpuStream) -> Result<()> {
        Ok(())
    }

    fn append(&self, stream: &mut CpuStream, args: &Append<'_, CpuBuffer>) -> Result<()> {
        args.validate(&self.caps)?;
        append::append(args);
        also_project(self, stream, args)
    }

    fn transfer(&self, _: &mut CpuStream, args: &Transfer<'_, CpuBuffer>) -> Result<()> {
        args.validate(&self.caps)?;
        transfer::transfer(args);
        Ok(())
    }

    fn attend(&self, _: &mut CpuStream, args: &Attend<'_, CpuBuffer>) -> Result<()> {
        args.validate(&self.caps)?;
        attend::attend(args);
        Ok(())
    }

    fn merge(&self, _: &mut CpuStream, args: &Merge<'_, CpuBuffer>) -> Result<()> {
        args.validate(&self.caps)?;
        attend::merge(args);
        Ok(())
    }

    fn fold(&self, _: &mut CpuStream, args: &Fold<'_, CpuBuffer>) -> Result<()> {
        args.validate(&self.caps)?;
        attend::fold(args);
        Ok(())
    }

    fn project(&self, _: &mut CpuStream, args: &Project<'_, CpuBuffer>) -> Result<()> {
        predict::project(args, &args.validate(&self.caps)?);
        Ok(())
    }

    fn score(&self, _: &mut CpuStream, args: &Score<'_, CpuBuffer>) -> Result<()> {
        predict::score(args, &args.validate(&self.caps)?);
        Ok(())
    }
}

impl CpuBackend {
    /// Puts host data into a new buffer.
    ///
    /// # Errors
    /// [`Error::Misaligned`] when the data is not a whole number of 32-bit words.
    pub fn buffer_from(&self, data: &[u8]) -> Result<CpuBuffer> {
        let buffer = self.alloc("host data", data.len() as u64)?;
        self.upload(&mut CpuStream, &buffer, 0, data)?;
        on_device(&buffer, "the new buffer", &self.caps)?;
        Ok(buffer)
    }
}
