//! Whose memory do the bytes of a run lie in? The heap's, or a device's that the host reaches as its own.

use crate::aligned::AlignedBuffer;
use crate::backend::HostMemory;
use crate::record::FILE_ALIGN;
use std::any::Any;
use std::fmt;

/// Memory of one run: nobody else has it while the run is under way.
#[derive(Debug)]
pub struct RunBuffer {
    /// Boxed, so that memory which lies in its owner does not move with the run either.
    memory: Box<dyn Memory>,
    len: usize,
}

trait Memory: Any + fmt::Debug + Send + Sync {
    fn bytes(&mut self) -> &mut [u8];
}

impl Memory for AlignedBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        self
    }
}

/// The only handle to memory of a device.
#[derive(Debug)]
struct Lone<H>(H);

impl<H: HostMemory> Memory for Lone<H> {
    fn bytes(&mut self) -> &mut [u8] {
        self.0.bytes_mut().unwrap_or_default()
    }
}

impl RunBuffer {
    /// Host memory that a device reaches too, so that it takes records from here and leaves them here by itself.
    ///
    /// # Errors
    /// The memory comes back where the host does not reach it as its own, where there are other handles to it, or where
    /// direct I/O would not take it: it must start on a multiple of 4096.
    pub fn of_host<H: HostMemory>(mut host: H) -> Result<Self, H> {
        let fit = host.bytes_mut().filter(|bytes| (bytes.as_ptr() as u64).is_multiple_of(FILE_ALIGN));
        match fit.map(|bytes| bytes.len()) {
            Some(len) => Ok(RunBuffer { memory: Box::new(Lone(host)), len }),
            None => Err(host),
        }
    }

    /// The host memory of the device that it lies in, for device work; `None` when it lies in the heap or in another
    /// kind of memory. No run may use the buffer before that work has finished.
    pub fn host<H: HostMemory>(&self) -> Option<&H> {
        let memory: &dyn Any = &*self.memory;
        memory.downcast_ref::<Lone<H>>().map(|lone| &lone.0)
    }

    /// Its bytes; none while there are other handles to the memory.
    pub fn bytes(&mut self) -> &mut [u8] {
        self.memory.bytes()
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl From<AlignedBuffer> for RunBuffer {
    fn from(buffer: AlignedBuffer) -> Self {
        RunBuffer { len: buffer.len(), memory: Box::new(buffer) }
    }
}

/// No bytes.
impl Default for RunBuffer {
    fn default() -> Self {
        AlignedBuffer::new(0).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::{CpuBackend, CpuHost};
    use crate::backend::{Backend, HostUse};

    #[test]
    fn memory_with_one_handle_is_a_buffer_and_comes_back_as_what_it_is() {
        let host = CpuBackend::new().alloc_host("test", 8192, HostUse::Shared).unwrap();
        let other = host.clone();
        let host = RunBuffer::of_host(host).unwrap_err();
        drop(other);
        let mut buffer = RunBuffer::of_host(host).unwrap();
        assert_eq!((buffer.len(), buffer.bytes().len()), (8192, 8192));
        let other = buffer.host::<CpuHost>().unwrap().clone();
        assert!(buffer.bytes().is_empty());
        drop(other);
        assert_eq!(buffer.bytes().len(), 8192);
        let mut heap = RunBuffer::from(AlignedBuffer::new(4096));
        assert!(heap.host::<CpuHost>().is_none() && heap.bytes().len() == 4096 && RunBuffer::default().is_empty());
    }
}
