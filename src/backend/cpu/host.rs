//! Host memory of the CPU backend: bytes, of which threads read and write their parts in turn.

use super::memory::{CpuBuffer, frame};
use crate::aligned::AlignedBuffer;
use crate::backend::{DeviceId, HostMemory, Swap};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// Host memory of the CPU backend, which starts on a multiple of 4096.
#[derive(Clone)]
pub struct CpuHost {
    memory: Arc<RwLock<AlignedBuffer>>,
    bytes: u64,
    device: DeviceId,
}

impl fmt::Debug for CpuHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuHost({} bytes)", self.bytes)
    }
}

impl HostMemory for CpuHost {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let memory = Arc::get_mut(&mut self.memory)?;
        Some(memory.get_mut().unwrap_or_else(PoisonError::into_inner))
    }
}

impl CpuHost {
    /// Zeroed memory, rounded up to whole words; `None` when there is not that much.
    pub(super) fn zeroed(device: DeviceId, bytes: u64) -> Option<Self> {
        let bytes = bytes.checked_next_multiple_of(4)?;
        let memory = AlignedBuffer::try_new(usize::try_from(bytes).ok()?)?;
        Some(CpuHost { memory: Arc::new(RwLock::new(memory)), bytes, device })
    }

    /// Copies a checked range out.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        out.copy_from_slice(&memory[offset as usize..][..out.len()]);
    }

    /// Copies a checked range in.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        let mut memory = self.memory.write().unwrap_or_else(PoisonError::into_inner);
        memory[offset as usize..][..data.len()].copy_from_slice(data);
    }
}

/// A validated swap out.
pub(super) fn swap_out(args: &Swap<'_, CpuBuffer, CpuHost>) {
    let mut memory = args.host.memory.write().unwrap_or_else(PoisonError::into_inner);
    for one in args.moves {
        let (slab, from) = frame(&args.arena, one.from, &args.record);
        slab.read(from, &mut memory[args.host_offset(one.to) as usize..][..args.record.bytes() as usize]);
    }
}

/// A validated swap in.
pub(super) fn swap_in(args: &Swap<'_, CpuBuffer, CpuHost>) {
    let memory = args.host.memory.read().unwrap_or_else(PoisonError::into_inner);
    for one in args.moves {
        let (slab, to) = frame(&args.arena, one.to, &args.record);
        slab.write(to, &memory[args.host_offset(one.from) as usize..][..args.record.bytes() as usize]);
    }
}
