//! What is host memory in wgpu? A mappable buffer that copies reach, or plain bytes that they land in later.
//!
//! With `MAPPABLE_PRIMARY_BUFFERS` a buffer may be both mappable and the source of copies: drivers keep it in cached host
//! memory, and copies move it by DMA both ways. It cannot be used and mapped at the same time, so it is for the device
//! alone. All other host memory is bytes of this process: what leaves the device passes through a *landing*, a mappable
//! buffer that is copied into the bytes once its submission has finished and somebody asks for them.

use super::health::{Submission, device_error, scoped};
use super::memory::create_buffer;
use super::{NAME, Shared};
use crate::backend::{DeviceId, HostMemory, HostUse, host_range};
use crate::{Error, Result};
use ::wgpu::{Buffer, BufferAsyncError, BufferUsages, Features, MapMode};
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Landings that may be under way: a program that is further ahead of the device waits.
const LANDINGS: usize = 4;

/// Host memory of the wgpu backend.
#[derive(Clone)]
pub struct WgpuHost {
    pub(super) memory: Memory,
    bytes: u64,
    device: DeviceId,
}

#[derive(Clone)]
pub(super) enum Memory {
    /// Reached by copies alone.
    Buffer(Buffer),
    /// Reached by the host alone.
    Bytes(Arc<Mutex<Bytes>>),
}

/// Bytes, and what has yet to land in them.
pub(super) struct Bytes {
    data: Vec<u8>,
    /// Oldest first.
    landings: VecDeque<Landing>,
    /// Buffers of earlier landings.
    spare: Vec<Buffer>,
}

/// Records that the device writes to a mappable buffer.
struct Landing {
    buffer: Buffer,
    submission: Submission,
    mapped: Arc<OnceLock<Result<(), BufferAsyncError>>>,
    records: Records,
}

/// Records side by side in a buffer, and where each of them goes.
pub(super) struct Records {
    /// Bytes from one to the next in the buffer.
    pub(super) stride: u64,
    /// Bytes of each.
    pub(super) bytes: u64,
    /// Where they go, in bytes from the start of the host memory.
    pub(super) to: Vec<u64>,
}

impl fmt::Debug for WgpuHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(self.memory, Memory::Buffer(_)) { "a buffer" } else { "bytes" };
        write!(f, "WgpuHost({} bytes, {kind})", self.bytes)
    }
}

impl HostMemory for WgpuHost {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn device(&self) -> DeviceId {
        self.device
    }
}

impl WgpuHost {
    pub(super) fn new(shared: &Shared, label: &str, bytes: u64, usage: HostUse) -> Result<Self> {
        shared.health.check()?;
        let purpose = format!("host memory: {label}");
        let mappable = shared.device.features().contains(Features::MAPPABLE_PRIMARY_BUFFERS);
        let memory = if usage == HostUse::Device && mappable {
            let most = shared.limits.max_buffer_size;
            if bytes > most {
                return Err(shared.limit("max_buffer_size", bytes, most, "host memory"));
            }
            let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
            Memory::Buffer(create_buffer(&shared.device, &purpose, bytes.max(4).next_multiple_of(4), usage)?)
        } else {
            let data = zeroed(bytes).ok_or(Error::OutOfMemory { backend: NAME, bytes, purpose })?;
            Memory::Bytes(Arc::new(Mutex::new(Bytes { data, landings: VecDeque::new(), spare: Vec::new() })))
        };
        Ok(WgpuHost { memory, bytes: bytes.next_multiple_of(4), device: shared.caps.device })
    }

    /// Its bytes, where it has any, with everything that was under way.
    fn landed(&self, shared: &Shared, operation: &'static str) -> Result<MutexGuard<'_, Bytes>> {
        shared.health.check()?;
        match &self.memory {
            Memory::Bytes(bytes) => {
                let mut bytes = lock(bytes);
                bytes.land(shared, 0)?;
                Ok(bytes)
            }
            Memory::Buffer(_) => {
                let format = "host memory that the device alone reaches".to_owned();
                Err(Error::Unsupported { backend: NAME, operation, format })
            }
        }
    }

    pub(super) fn read(&self, shared: &Shared, offset: u64, out: &mut [u8]) -> Result<()> {
        host_range(self, offset, out.len(), &shared.caps)?;
        out.copy_from_slice(self.landed(shared, "read_host")?.at(offset, out.len()));
        Ok(())
    }

    pub(super) fn write(&self, shared: &Shared, offset: u64, data: &[u8]) -> Result<()> {
        host_range(self, offset, data.len(), &shared.caps)?;
        // What landed later would overwrite it.
        let mut bytes = self.landed(shared, "write_host")?;
        bytes.data[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
}

/// The bytes, whatever a thread that panicked did: copies leave nothing half done that counts.
pub(super) fn lock(bytes: &Mutex<Bytes>) -> MutexGuard<'_, Bytes> {
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Zeros in whole words; `None` when there is not that much memory.
fn zeroed(bytes: u64) -> Option<Vec<u8>> {
    let bytes = usize::try_from(bytes.checked_next_multiple_of(4)?).ok()?;
    let mut data = Vec::new();
    data.try_reserve_exact(bytes).ok()?;
    data.resize(bytes, 0);
    Some(data)
}

impl Bytes {
    /// A range that was checked. What has yet to land is not in it.
    pub(super) fn at(&self, offset: u64, bytes: usize) -> &[u8] {
        &self.data[offset as usize..][..bytes]
    }

    /// A mappable buffer of at least this size for the next landing. Waits while too many are under way.
    pub(super) fn landing_buffer(&mut self, shared: &Shared, bytes: u64) -> Result<Buffer> {
        self.land(shared, LANDINGS - 1)?;
        match self.spare.iter().position(|buffer| buffer.size() >= bytes) {
            Some(at) => Ok(self.spare.swap_remove(at)),
            None => {
                let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
                create_buffer(&shared.device, "kvtide landing", bytes.next_power_of_two(), usage)
            }
        }
    }

    /// Notes that a submission writes records to a landing buffer.
    pub(super) fn expect(
        &mut self,
        shared: &Shared,
        buffer: Buffer,
        submission: Submission,
        records: Records,
    ) -> Result<()> {
        let mapped = Arc::new(OnceLock::new());
        let report = mapped.clone();
        let map = || {
            buffer.map_async(MapMode::Read, .., move |result| {
                let _ = report.set(result);
            });
        };
        scoped(&shared.device, map).map_err(|error| shared.health.fail(error))?;
        self.landings.push_back(Landing { buffer, submission, mapped, records });
        Ok(())
    }

    /// Takes in everything that has arrived, and waits until at most `left` landings are under way.
    pub(super) fn land(&mut self, shared: &Shared, left: usize) -> Result<()> {
        while let Some(first) = self.landings.front() {
            let mapped = || first.mapped.get().is_some();
            if self.landings.len() > left {
                shared.health.wait(&shared.device, &first.submission, mapped)?;
            } else if !(shared.health.is_done(&shared.device, &first.submission)? && mapped()) {
                break;
            }
            if let Some(Err(error)) = first.mapped.get() {
                return Err(shared.health.fail(error));
            }
            first.copy_into(&mut self.data)?;
            if let Some(Landing { buffer, .. }) = self.landings.pop_front() {
                buffer.unmap();
                self.spare.push(buffer);
                // The smallest goes: those that are left serve the larger landings.
                if self.spare.len() > LANDINGS {
                    self.spare.sort_by_key(|buffer| std::cmp::Reverse(buffer.size()));
                    self.spare.pop();
                }
            }
        }
        Ok(())
    }
}

impl Landing {
    fn copy_into(&self, data: &mut [u8]) -> Result<()> {
        let Records { stride, bytes, to } = &self.records;
        let landed = self.buffer.get_mapped_range(..).map_err(device_error)?;
        for (from, to) in landed.chunks(*stride as usize).zip(to) {
            data[*to as usize..][..*bytes as usize].copy_from_slice(&from[..*bytes as usize]);
        }
        Ok(())
    }
}
