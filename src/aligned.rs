//! Heap memory that starts on a multiple of 4096, as direct I/O wants it.

use crate::record::FILE_ALIGN;
use std::ops::{Deref, DerefMut};

const ALIGN: usize = FILE_ALIGN as usize;

/// Zeroed bytes on the heap that start on a multiple of 4096 and never move.
pub struct AlignedBuffer {
    /// The bytes and what it takes to align them; never grown, so that the window stays where it is.
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// `len` bytes, all zero.
    pub fn new(len: usize) -> Self {
        if len == 0 { Self::window(Vec::new(), 0) } else { Self::window(vec![0; len + ALIGN - 1], len) }
    }

    /// The same; `None` when there is not that much memory.
    pub(crate) fn try_new(len: usize) -> Option<Self> {
        let mut memory = Vec::new();
        if len > 0 {
            memory.try_reserve_exact(len.checked_add(ALIGN - 1)?).ok()?;
            memory.resize(len + ALIGN - 1, 0);
        }
        Some(Self::window(memory, len))
    }

    fn window(memory: Vec<u8>, len: usize) -> Self {
        let start = if len == 0 { 0 } else { memory.as_ptr().align_offset(ALIGN) };
        AlignedBuffer { memory, start, len }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl Clone for AlignedBuffer {
    fn clone(&self) -> Self {
        let mut copy = AlignedBuffer::new(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

impl std::fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_keep_their_place_when_moved() {
        for len in [0, 1, 4095, 4096, 4097, 1 << 20] {
            for mut buffer in [AlignedBuffer::new(len), AlignedBuffer::try_new(len).unwrap()] {
                assert!(buffer.len() == len && buffer.iter().all(|&byte| byte == 0));
                if len > 0 {
                    assert!((buffer.as_ptr() as usize).is_multiple_of(ALIGN));
                }
                buffer.fill(7);
                let (place, copy) = (buffer.as_ptr(), buffer.clone());
                let moved = Box::new(buffer);
                assert_eq!(moved.as_ptr(), place);
                assert_eq!(&copy[..], &moved[..]);
            }
        }
        assert!(AlignedBuffer::try_new(usize::MAX).is_none() && AlignedBuffer::try_new(isize::MAX as usize).is_none());
    }
}
