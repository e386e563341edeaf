//! What does one dispatch bind, and how many workgroups has it?

use super::health::{device_error, scoped};
use super::kernels::{Access, Kernel, Slabs};
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

    /// Whether a buffer is read in one binding and written in another, which wgpu refuses.
    pub(super) fn conflicts(&self) -> bool {
        let spec = self.kernel.spec();
        let uses = || {
            let own = self.buffers.iter().map(|window| window.buffer).zip(spec.buffers.iter().copied());
            own.chain(self.slabs.iter().zip(spec.slabs.map(Slabs::access).into_iter().cycle()))
        };
        let mut written = uses().filter(|(_, access)| *access == Access::Write);
        written.any(|(to, _)| uses().any(|(from, access)| access != Access::Write && from.same_memory(to)))
    }

    /// Group 1, which has this layout.
    pub(super) fn bind(&self, shared: &Shared, layout: &BindGroupLayout) -> Result<BindGroup> {
        let spec = self.kernel.spec();
        if self.conflicts() {
            let format = "inputs and outputs in one buffer".to_owned();
            return Err(Error::Unsupported { backend: NAME, operation: spec.entry, format });
        }
        let slabs = self.slabs.iter().map(|slab| slab.whole(shared)).collect::<Result<Vec<_>>>()?;
        let own = (0..).zip(self.buffers.iter().map(Window::resource));
        let spare = std::iter::repeat_with(|| shared.spare.raw().as_entire_binding());
        let bound = slabs.iter().map(Window::resource).chain(spare);
        let entries: Vec<_> = own
            .chain((spec.first_slab()..spec.first_slab() + self.kernel.slab_bindings(slabs.len())).zip(bound))
            .map(|(binding, resource)| BindGroupEntry { binding, resource })
            .collect();
        let descriptor = BindGroupDescriptor { label: Some(spec.entry), layout, entries: &entries };
        scoped(&shared.device, || shared.device.create_bind_group(&descriptor)).map_err(device_error)
    }
}
