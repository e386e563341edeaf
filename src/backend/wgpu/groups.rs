//! Which bind groups are used again? A decode step binds the same buffers, token after token, and to make a group takes longer
//! than to record what uses it.
//!
//! A group keeps what it binds alive. One that its stream has not used for a few submissions is dropped.

use super::dispatch::Dispatch;
use super::kernels::Kernel;
use crate::Result;
use ::wgpu::{BindGroup, Buffer};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Submissions that a group outlives without being used.
const IDLE: u64 = 8;

/// The groups of one stream.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// By a hash of what they bind; of two with the same hash the later one stays.
    made: HashMap<u64, Made>,
    submissions: u64,
}

#[derive(Debug)]
struct Made {
    kernel: Kernel,
    /// Buffer, offset and bytes of each window.
    windows: Vec<(Buffer, u64, u64)>,
    slabs: Vec<Buffer>,
    group: BindGroup,
    used: u64,
}

impl Made {
    fn is_of(&self, dispatch: &Dispatch<'_>) -> bool {
        self.kernel == dispatch.kernel
            && self.windows.len() == dispatch.buffers.len()
            && self.slabs.len() == dispatch.slabs.len()
            && self.windows.iter().zip(dispatch.buffers).all(|((buffer, offset, bytes), window)| {
                (*offset, *bytes) == (window.offset, window.bytes) && buffer == window.buffer.raw()
            })
            && self.slabs.iter().zip(dispatch.slabs).all(|(buffer, slab)| buffer == slab.raw())
    }
}

impl Groups {
    /// The group of a dispatch, made when there is none.
    pub(super) fn get(
        &mut self,
        dispatch: &Dispatch<'_>,
        make: impl FnOnce() -> Result<BindGroup>,
    ) -> Result<BindGroup> {
        let hash = hash_of(dispatch);
        if let Some(made) = self.made.get_mut(&hash)
            && made.is_of(dispatch)
        {
            made.used = self.submissions;
            return Ok(made.group.clone());
        }
        let group = make()?;
        let windows = dispatch.buffers.iter().map(|window| (window.buffer.raw().clone(), window.offset, window.bytes));
        let made = Made {
            kernel: dispatch.kernel,
            windows: windows.collect(),
            slabs: dispatch.slabs.iter().map(|slab| slab.raw().clone()).collect(),
            group: group.clone(),
            used: self.submissions,
        };
        self.made.insert(hash, made);
        Ok(group)
    }

    /// The stream has handed a batch to the queue.
    pub(super) fn submitted(&mut self) {
        self.submissions += 1;
        let now = self.submissions;
        self.made.retain(|_, made| made.used + IDLE >= now);
    }
}

fn hash_of(dispatch: &Dispatch<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    dispatch.kernel.hash(&mut hasher);
    for window in dispatch.buffers {
        (window.buffer.raw(), window.offset, window.bytes).hash(&mut hasher);
    }
    for slab in dispatch.slabs {
        slab.raw().hash(&mut hasher);
    }
    hasher.finish()
}
