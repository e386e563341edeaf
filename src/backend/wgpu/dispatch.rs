//! What does one dispatch bind, and how many workgroups has it?

use super::health::{device_error, scoped};
use super::kernels::{Access, FIRST_SLAB, Kernel, Slabs};
use super::memory::Window;
use super::{NAME, Shared, WgpuBuffer};
use crate::backend::DeviceBuffer;
use crate::{Error, Result};
use ::wgpu::{BindGroup, BindGroupDescriptor, BindGroupEntry, BindGroupLayout};

/// Workgroups a dimension; `FOLD` in `shaders/params.wgsl`.
pub(super) const FOLD: u64 = 65_535;

/// Folds a count of workgroups into two dimensions.
pub(super) fn fold(count: u64) -> [u64; 2] {
    if count <= FOLD { [count, 1] } else { [FOLD, count.div_ceil(FOLD)] }
}

/// One dispatch.
pub(super) struct Dispatch<'a> {
    pub(super) kernel: Kernel,
    /// Group 1 from binding 0 on.
    pub(super) buffers: &'a [Window<'a>],
    pub(super) slabs: &'a [WgpuBuffer],
    pub(super) grid: [u64; 3],
}

impl Dispatch<'_> {
    pub(super) fn workgroups(&self) -> Result<[u32; 3]> {
        match self.grid.into_iter().find(|&n| n > FOLD) {
            Some(value) => Err(Error::TooLarge { what: "the workgroups of one call", value, maximum: FOLD }),
            None => Ok(self.grid.map(|n| n as u32)),
        }
    }

    /// Group 1, which has this layout.
    pub(super) fn bind(&self, shared: &Shared, layout: &BindGroupLayout) -> Result<BindGroup> {
        let spec = self.kernel.spec();
        let slabs = self.slabs.iter().map(|slab| slab.whole(shared)).collect::<Result<Vec<_>>>()?;
        let uses = || {
            let own = self.buffers.iter().zip(spec.buffers.iter().copied());
            own.chain(slabs.iter().zip(spec.slabs.map(Slabs::access).into_iter().cycle()))
        };
        // wgpu refuses a buffer that one dispatch reads in one binding and writes in another.
        for (written, _) in uses().filter(|(_, access)| *access == Access::Write) {
            if uses().any(|(read, access)| access != Access::Write && read.buffer.same_memory(written.buffer)) {
                let format = "inputs and outputs in one buffer".to_owned();
                return Err(Error::Unsupported { backend: NAME, operation: spec.entry, format });
            }
        }
        let own = (0..).zip(self.buffers.iter().map(Window::resource));
        let spare = std::iter::repeat_with(|| shared.spare.raw().as_entire_binding());
        let bound = slabs.iter().map(Window::resource).chain(spare);
        let entries: Vec<_> = own
            .chain((FIRST_SLAB..FIRST_SLAB + self.kernel.slab_bindings(slabs.len())).zip(bound))
            .map(|(binding, resource)| BindGroupEntry { binding, resource })
            .collect();
        let descriptor = BindGroupDescriptor { label: Some(spec.entry), layout, entries: &entries };
        scoped(&shared.device, || shared.device.create_bind_group(&descriptor)).map_err(device_error)
    }
}
