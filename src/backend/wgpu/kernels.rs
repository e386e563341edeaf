//! Which text does a kernel have, and what does it bind?
//!
//! The WGSL of a variant is put together from files of `shaders/` and the declarations of its slabs: an arena of several
//! buffers is several bindings, with an accessor that chooses among them.

use crate::Dtype;
use crate::record::Record;
use ::wgpu::Limits;
use std::fmt::Write as _;
use std::ops::Range;

/// Storage buffers besides the slabs that a kernel binds at most, where nothing stands in for it: the descriptors and three of
/// its own.
pub(super) const OTHER_BUFFERS: u32 = 4;
/// Uniform buffers that a kernel binds at most: the parameters and the channels.
pub(super) const UNIFORM_BUFFERS: u32 = 2;
/// Slabs that an arena has at most.
pub(super) const MAX_SLABS: u32 = 64;

/// How a kernel uses a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    /// Reads [`Channels`](crate::backend::ops::Channels), as a uniform buffer: storage buffers are for slabs.
    Channels,
}

/// How a kernel uses the slabs, and what it loads or stores at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slabs {
    ReadQuads,
    WriteQuads,
    /// Rows that share a quad have several writers, each of whole words.
    WriteWords,
}

impl Slabs {
    pub(super) const fn access(self) -> Access {
        match self {
            Slabs::ReadQuads => Access::Read,
            Slabs::WriteQuads | Slabs::WriteWords => Access::Write,
        }
    }
}

/// A kernel; copy, gather and scatter are the three forms of `transfer`, queries the first step of `score`. Those for int8
/// pages are compiled for a number of channels (KV heads × elements of a key).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    Append,
    AppendInt8(u32),
    /// `append` and `project` in one, where a device can [bind all that](Kernel::fits).
    AppendProjectInt8(u32),
    Copy,
    Gather,
    Scatter,
    Attend(Dtype),
    AttendInt8(u32),
    Merge,
    Fold,
    Project,
    ProjectInt8(u32),
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
    pub(super) slabs: Option<Slabs>,
}

impl Spec {
    /// The first slab's binding in group 1.
    pub(super) const fn first_slab(&self) -> u32 {
        self.buffers.len() as u32
    }
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
    /// All of them, for an example's channels.
    const ALL: [Kernel; 18] = [
        Kernel::Append,
        Kernel::AppendInt8(1024),
        Kernel::AppendProjectInt8(1024),
        Kernel::Copy,
        Kernel::Gather,
        Kernel::Scatter,
        Kernel::Attend(Dtype::F32),
        Kernel::Attend(Dtype::F16),
        Kernel::Attend(Dtype::Bf16),
        Kernel::AttendInt8(1024),
        Kernel::Merge,
        Kernel::Fold,
        Kernel::Project,
        Kernel::ProjectInt8(1024),
        Kernel::Queries,
        Kernel::Score,
        Kernel::Fill,
        Kernel::Sum,
    ];

    pub(super) fn append(record: &Record) -> Self {
        record.format().dtype().map_or(Kernel::AppendInt8(channels(record)), |_| Kernel::Append)
    }

    /// The kernel that projects the keys it appends, of formats that have one.
    pub(super) fn append_project(record: &Record) -> Option<Self> {
        record.format().is_quantized().then(|| Kernel::AppendProjectInt8(channels(record)))
    }

    pub(super) fn attend(record: &Record) -> Self {
        record.format().dtype().map_or(Kernel::AttendInt8(channels(record)), Kernel::Attend)
    }

    pub(super) fn project(record: &Record) -> Self {
        record.format().dtype().map_or(Kernel::ProjectInt8(channels(record)), |_| Kernel::Project)
    }

    pub(super) const fn spec(self) -> Spec {
        use Access::{Channels, Read, Write};
        use Slabs::{ReadQuads, WriteQuads, WriteWords};
        match self {
            Kernel::Append => spec!(
                "append",
                "append",
                [Read, Read, Write],
                Some(WriteQuads),
                ["params", "append_params", "record", "numeric", "append", "append_native"]
            ),
            Kernel::AppendInt8(_) => spec!(
                "append-int8",
                "append",
                [Read, Read, Write, Channels],
                Some(WriteWords),
                [
                    "params",
                    "append_params",
                    "record",
                    "numeric",
                    "channels",
                    "quantize",
                    "append",
                    "append_rows",
                    "append_int8"
                ]
            ),
            Kernel::AppendProjectInt8(_) => spec!(
                "append-project-int8",
                "append",
                [Read, Read, Write, Read, Write, Channels],
                Some(WriteWords),
                [
                    "params",
                    "record",
                    "projections",
                    "numeric",
                    "channels",
                    "codes",
                    "restore",
                    "quantize",
                    "append",
                    "append_rows",
                    "project_tile",
                    "append_project_int8"
                ]
            ),
            Kernel::Copy => spec!("copy", "transfer", [], Some(WriteQuads), ["params", "record", "transfer", "copy"]),
            Kernel::Gather => {
                spec!("gather", "transfer", [Write], Some(ReadQuads), ["params", "record", "transfer", "gather"])
            }
            Kernel::Scatter => {
                spec!("scatter", "transfer", [Read], Some(WriteQuads), ["params", "record", "transfer", "scatter"])
            }
            Kernel::Attend(_) => spec!(
                "attend",
                "attend",
                [Read, Read, Write],
                Some(ReadQuads),
                ["params", "record", "numeric", "softmax", "add", "tiles", "outputs", "attend", "attend_native"]
            ),
            Kernel::AttendInt8(_) => spec!(
                "attend-int8",
                "attend",
                [Read, Read, Write, Channels],
                Some(ReadQuads),
                [
                    "params",
                    "record",
                    "numeric",
                    "softmax",
                    "add",
                    "channels",
                    "codes",
                    "halves",
                    "tiles",
                    "outputs",
                    "attend",
                    "attend_int8"
                ]
            ),
            Kernel::Merge => {
                spec!(
                    "merge",
                    "merge",
                    [Read, Write, Write],
                    None,
                    ["params", "numeric", "softmax", "add", "states", "merge"]
                )
            }
            Kernel::Fold => spec!("fold", "fold", [Write], None, ["params", "softmax", "add", "states", "fold"]),
            Kernel::Project => spec!(
                "project",
                "project",
                [Read, Write],
                Some(ReadQuads),
                ["params", "record", "projections", "numeric", "project_tile", "project", "project_native"]
            ),
            Kernel::ProjectInt8(_) => spec!(
                "project-int8",
                "project",
                [Read, Write, Channels],
                Some(ReadQuads),
                [
                    "params",
                    "record",
                    "projections",
                    "numeric",
                    "channels",
                    "codes",
                    "halves",
                    "restore",
                    "project_tile",
                    "project",
                    "project_int8"
                ]
            ),
            Kernel::Queries => spec!(
                "queries",
                "project_queries",
                [Read, Read, Write],
                None,
                ["params", "projections", "numeric", "queries"]
            ),
            Kernel::Score => {
                spec!("score", "score", [Read, Write], Some(ReadQuads), ["params", "projections", "score"])
            }
            Kernel::Fill => spec!("fill", "fill", [Write], None, ["params", "fill"]),
            Kernel::Sum => spec!("sum", "sum", [Read, Write], None, ["params", "sum"]),
        }
    }

    pub(super) fn constants(self) -> Vec<(&'static str, f64)> {
        match self {
            Kernel::Attend(dtype) => vec![("page_format", dtype.code().into())],
            _ => Vec::new(),
        }
    }

    /// Slab bindings of the variant that handles this many slabs.
    pub(super) const fn slab_bindings(self, slabs: usize) -> u32 {
        if self.spec().slabs.is_some() { (slabs as u32).next_power_of_two() } else { 0 }
    }

    /// Storage buffers of the variant with this many slab bindings.
    fn storage_buffers(self, slabs: u32) -> u32 {
        let own = self.spec().buffers.iter().filter(|&&access| access != Access::Channels).count();
        1 + own as u32 + slabs
    }

    /// Whether a device can bind what the variant for this many slabs does.
    pub(super) fn fits(self, slabs: usize, limits: &Limits) -> bool {
        let slabs = self.slab_bindings(slabs);
        let storage = self.storage_buffers(slabs);
        storage <= limits.max_storage_buffers_per_shader_stage
            && storage + UNIFORM_BUFFERS <= limits.max_buffers_and_acceleration_structures_per_shader_stage
            && self.spec().first_slab() + slabs <= limits.max_bindings_per_bind_group
    }

    pub(super) fn source(self, slabs: u32) -> String {
        let spec = self.spec();
        let mut text = spec.sources.join("\n");
        if let Some(uses) = spec.slabs {
            declare_slabs(&mut text, spec.first_slab()..spec.first_slab() + slabs, uses);
        }
        if let Kernel::AppendInt8(channels)
        | Kernel::AppendProjectInt8(channels)
        | Kernel::AttendInt8(channels)
        | Kernel::ProjectInt8(channels) = self
        {
            declare_channels(&mut text, channels, spec.buffers);
        }
        text
    }
}

fn channels(record: &Record) -> u32 {
    record.geometry().kv_heads() * record.geometry().k_dim()
}

/// Bindings of the slabs and the functions that reach into them.
fn declare_slabs(text: &mut String, bindings: Range<u32>, uses: Slabs) {
    let (mode, ty) = match uses {
        Slabs::ReadQuads => ("read", "vec4<u32>"),
        Slabs::WriteQuads => ("read_write", "vec4<u32>"),
        Slabs::WriteWords => ("read_write", "u32"),
    };
    text.push_str("\n// The slabs of the arena.\n");
    let slabs = bindings.len() as u32;
    for (slab, binding) in bindings.enumerate() {
        let _ = writeln!(text, "@group(1) @binding({binding}) var<storage, {mode}> slab{slab}: array<{ty}>;");
    }
    if uses != Slabs::WriteWords {
        accessor(text, slabs, "load_quad(slab: u32, quad: u32) -> vec4<u32>", |i| format!("return slab{i}[quad];"));
    }
    match uses {
        Slabs::ReadQuads => {}
        Slabs::WriteQuads => accessor(text, slabs, "store_quad(slab: u32, quad: u32, words: vec4<u32>)", |i| {
            format!("slab{i}[quad] = words;")
        }),
        Slabs::WriteWords => {
            accessor(text, slabs, "store_word(slab: u32, word: u32, value: u32)", |i| format!("slab{i}[word] = value;"))
        }
    }
}

/// The binding of the channels: three numbers for each of them. A uniform array has a length, and what is bound must be that
/// long, so it is exactly what the caller has.
fn declare_channels(text: &mut String, channels: u32, buffers: &[Access]) {
    let binding = buffers.iter().position(|&access| access == Access::Channels).unwrap_or(buffers.len());
    let fours = 3 * channels / 4;
    let _ = writeln!(text, "\n// The channels of the keys.");
    let _ = writeln!(text, "@group(1) @binding({binding}) var<uniform> channels: array<vec4<f32>, {fours}>;");
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
    /// The storage buffers that a device must be able to bind before the backend compiles it.
    pub storage: u32,
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
            if let Kernel::Attend(dtype) = kernel {
                let _ = write!(name, "-{}", dtype.name());
            }
            if slabs > 0 {
                let _ = write!(name, "-{slabs}");
            }
            let (wgsl, constants) = (kernel.source(slabs), kernel.constants());
            let storage = kernel.storage_buffers(slabs);
            variants.push(ShaderVariant { name, wgsl, entry: spec.entry, constants, slabs, storage });
        }
    }
    variants
}
