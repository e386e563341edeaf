//! Which texts may the backend compile? For tests of shaders without a device.

use super::kernels::{Kernel, MAX_SLABS};
use super::shapes::AttendShape;
use std::fmt::Write as _;

/// One text that the backend may compile, for tests of shaders without a device.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub struct ShaderVariant {
    /// Kernel, slabs and constants in one word.
    pub name: String,
    /// The whole module.
    pub wgsl: String,
    /// Its entry point.
    pub entry: &'static str,
    /// Values of its overrides.
    pub constants: Vec<(&'static str, f64)>,
    /// Its slab bindings.
    pub slabs: u32,
    /// The storage buffers that a device must be able to bind before the backend compiles it.
    pub storage: u32,
    /// Whether it uses subgroups, and is compiled where the device has them. Nothing enables them in the text: naga 30 knows no
    /// such line, which other compilers ask for.
    pub subgroups: bool,
}

/// Every text that the backend may compile.
#[doc(hidden)]
pub fn shader_variants() -> Vec<ShaderVariant> {
    let mut variants = Vec::new();
    for kernel in Kernel::OTHERS.into_iter().chain(AttendShape::examples().into_iter().map(Kernel::Attend)) {
        let spec = kernel.spec();
        let most = if spec.slabs.is_some() { MAX_SLABS } else { 1 };
        for slabs in std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n <= most) {
            let slabs = kernel.slab_bindings(slabs as usize);
            let mut name = spec.name.to_owned();
            if let Kernel::Attend(shape) = kernel {
                let _ = write!(name, "-{shape}");
            }
            if slabs > 0 {
                let _ = write!(name, "-{slabs}");
            }
            let (wgsl, constants) = (kernel.source(slabs), kernel.constants());
            let storage = kernel.storage_buffers(slabs);
            let subgroups = kernel.subgroups();
            variants.push(ShaderVariant { name, wgsl, entry: spec.entry, constants, slabs, storage, subgroups });
        }
    }
    variants
}
