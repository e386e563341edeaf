//! Which text does a kernel have, and what does it bind?
//!
//! The WGSL of a variant is put together from files of `shaders/` and the declarations of its slabs: an arena of several
//! buffers is several bindings, with an accessor that chooses among them.

use crate::PageFormat;
use std::fmt::Write as _;

/// Buffers besides the slabs that a kernel binds at most: the descriptors and three of its own.
pub(super) const OTHER_BUFFERS: u32 = 4;
/// Slabs that an arena has at most.
pub(super) const MAX_SLABS: u32 = 64;
/// The first slab's binding in group 1.
pub(super) const FIRST_SLAB: u32 = 4;

/// How a kernel uses a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// A kernel; copy, gather and scatter are the three forms of `transfer`, queries the first step of `score`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    Append,
    Copy,
    Gather,
    Scatter,
    Attend(PageFormat),
    Merge,
    Fold,
    Project,
    Queries,
    Score,
    Fill,
    Sum,
}

/// What a kernel is made of.
pub(super) struct Spec {
    pub(super) name: &'static str,
    pub(super) entry: &'static str,
    sources: &'static [&'static str],
    /// Bindings 0.. of group 1.
    pub(super) buffers: &'static [Access],
    pub(super) slabs: Option<Access>,
}

macro_rules! wgsl {
    ($name:literal) => {
        include_str!(concat!("../../../shaders/", $name, ".wgsl"))
    };
}

macro_rules! spec {
    ($name:literal, $entry:literal, $buffers:expr, $slabs:expr, [$($source:literal),*]) => {
        Spec { name: $name, entry: $entry, buffers: &$buffers, slabs: $slabs, sources: &[$(wgsl!($source)),*] }
    };
}

impl Kernel {
    const ALL: [Kernel; 14] = [
        Kernel::Append,
        Kernel::Copy,
        Kernel::Gather,
        Kernel::Scatter,
        Kernel::Attend(PageFormat::F32),
        Kernel::Attend(PageFormat::F16),
        Kernel::Attend(PageFormat::Bf16),
        Kernel::Merge,
        Kernel::Fold,
        Kernel::Project,
        Kernel::Queries,
        Kernel::Score,
        Kernel::Fill,
        Kernel::Sum,
    ];

    pub(super) const fn spec(self) -> Spec {
        use Access::{Read, Write};
        match self {
            Kernel::Append => {
                spec!("append", "append", [Read, Read, Write], Some(Write), ["params", "record", "numeric", "append"])
            }
            Kernel::Copy => spec!("copy", "transfer", [], Some(Write), ["params", "record", "transfer", "copy"]),
            Kernel::Gather => {
                spec!("gather", "transfer", [Write], Some(Read), ["params", "record", "transfer", "gather"])
            }
            Kernel::Scatter => {
                spec!("scatter", "transfer", [Read], Some(Write), ["params", "record", "transfer", "scatter"])
            }
            Kernel::Attend(_) => spec!(
                "attend",
                "attend",
                [Read, Read, Write],
                Some(Read),
                ["params", "record", "numeric", "softmax", "attend"]
            ),
            Kernel::Merge => {
                spec!("merge", "merge", [Read, Write, Write], None, ["params", "numeric", "softmax", "states", "merge"])
            }
            Kernel::Fold => spec!("fold", "fold", [Write], None, ["params", "softmax", "states", "fold"]),
            Kernel::Project => spec!(
                "project",
                "project",
                [Read, Write],
                Some(Read),
                ["params", "record", "projections", "numeric", "project"]
            ),
            Kernel::Queries => spec!(
                "queries",
                "project_queries",
                [Read, Read, Write],
                None,
                ["params", "projections", "numeric", "queries"]
            ),
            Kernel::Score => {
                spec!("score", "score", [Read, Write], Some(Read), ["params", "projections", "score"])
            }
            Kernel::Fill => spec!("fill", "fill", [Write], None, ["params", "fill"]),
            Kernel::Sum => spec!("sum", "sum", [Read, Write], None, ["params", "sum"]),
        }
    }

    pub(super) fn constants(self) -> Vec<(&'static str, f64)> {
        match self {
            Kernel::Attend(format) => vec![("page_format", format.dtype().code().into())],
            _ => Vec::new(),
        }
    }

    /// Slab bindings of the variant that handles this many slabs.
    pub(super) const fn slab_bindings(self, slabs: usize) -> u32 {
        if self.spec().slabs.is_some() { (slabs as u32).next_power_of_two() } else { 0 }
    }

    pub(super) fn source(self, slabs: u32) -> String {
        let spec = self.spec();
        let declarations = spec.slabs.map(|access| slab_declarations(slabs, access));
        spec.sources.iter().copied().chain(declarations.as_deref()).collect::<Vec<_>>().join("\n")
    }
}

/// Bindings of the slabs and the functions that reach into them.
fn slab_declarations(slabs: u32, access: Access) -> String {
    let mode = if access == Access::Read { "read" } else { "read_write" };
    let mut text = "// The slabs of the arena.\n".to_owned();
    for slab in 0..slabs {
        let binding = FIRST_SLAB + slab;
        let _ = writeln!(text, "@group(1) @binding({binding}) var<storage, {mode}> slab{slab}: array<vec4<u32>>;");
    }
    accessor(&mut text, slabs, "load_quad(slab: u32, quad: u32) -> vec4<u32>", |i| format!("return slab{i}[quad];"));
    if access == Access::Write {
        accessor(&mut text, slabs, "store_quad(slab: u32, quad: u32, words: vec4<u32>)", |i| {
            format!("slab{i}[quad] = words;")
        });
    }
    text
}

fn accessor(text: &mut String, slabs: u32, head: &str, body: impl Fn(u32) -> String) {
    let _ = writeln!(text, "\nfn {head} {{\n    switch slab {{");
    for slab in 1..slabs {
        let _ = writeln!(text, "        case {slab}u: {{ {} }}", body(slab));
    }
    let _ = writeln!(text, "        default: {{ {} }}\n    }}\n}}", body(0));
}

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
}

/// Every text that the backend may compile.
#[doc(hidden)]
pub fn shader_variants() -> Vec<ShaderVariant> {
    let mut variants = Vec::new();
    for kernel in Kernel::ALL {
        let spec = kernel.spec();
        let most = if spec.slabs.is_some() { MAX_SLABS } else { 1 };
        for slabs in std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n <= most) {
            let slabs = kernel.slab_bindings(slabs as usize);
            let mut name = spec.name.to_owned();
            if let Kernel::Attend(format) = kernel {
                let _ = write!(name, "-{}", format.name());
            }
            if slabs > 0 {
                let _ = write!(name, "-{slabs}");
            }
            let (wgsl, constants) = (kernel.source(slabs), kernel.constants());
            variants.push(ShaderVariant { name, wgsl, entry: spec.entry, constants, slabs });
        }
    }
    variants
}
