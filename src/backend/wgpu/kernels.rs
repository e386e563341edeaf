//! Which kernels are there, what are they made of, and what do they bind?

use super::shapes::AttendShape;
use crate::record::Record;
use ::wgpu::Limits;

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
    /// Rows of int8 pages are whole halves of quads.
    ReadHalves,
    WriteQuads,
    /// Rows that share a quad have several writers, each of whole words.
    WriteWords,
}

impl Slabs {
    pub(super) const fn access(self) -> Access {
        match self {
            Slabs::ReadQuads | Slabs::ReadHalves => Access::Read,
            Slabs::WriteQuads | Slabs::WriteWords => Access::Write,
        }
    }
}

/// How the rows lie that are appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// Anyhow.
    Words,
    /// Element by element, from multiples of 16 bytes on.
    Quads,
}

/// A kernel; copy, gather and scatter are the three forms of `transfer`, queries the first step of `score`. Those for int8
/// pages are compiled for a number of channels (KV heads × elements of a key).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    Append(Source),
    AppendInt8(u32, Source),
    /// `append` and `project` in one, where a device can [bind all that](Kernel::fits).
    AppendProjectInt8(u32, Source),
    Copy,
    Gather,
    Scatter,
    Attend(AttendShape),
    Merge,
    /// For many states of few rows.
    MergeLong,
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
    pub(super) sources: &'static [&'static str],
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

pub(super) use wgsl;

macro_rules! spec {
    ($name:literal, $entry:literal, $buffers:expr, $slabs:expr, [$($source:literal),*]) => {
        Spec { name: $name, entry: $entry, buffers: &$buffers, slabs: $slabs, sources: &[$(wgsl!($source)),*] }
    };
}

pub(super) use spec;

/// The kernels that append, by how they read what is appended.
macro_rules! append {
    ($name:literal, $source:literal) => {
        spec!(
            $name,
            "append",
            [Access::Read, Access::Read, Access::Write],
            Some(Slabs::WriteQuads),
            ["params", "append_params", "record", "numeric", "append", $source, "append_native"]
        )
    };
}

macro_rules! append_int8 {
    ($name:literal, $source:literal) => {
        spec!(
            $name,
            "append",
            [Access::Read, Access::Read, Access::Write, Access::Channels],
            Some(Slabs::WriteWords),
            [
                "params",
                "append_params",
                "record",
                "numeric",
                "channels",
                "quantize",
                "append",
                $source,
                "append_rows",
                "append_int8"
            ]
        )
    };
}

macro_rules! append_project_int8 {
    ($name:literal, $source:literal) => {
        spec!(
            $name,
            "append",
            [Access::Read, Access::Read, Access::Write, Access::Read, Access::Write, Access::Channels],
            Some(Slabs::WriteWords),
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
                $source,
                "append_rows",
                "project_run",
                "project_tile",
                "append_project_int8"
            ]
        )
    };
}

impl Kernel {
    /// All but those of `attend`, for an example's channels.
    pub(super) const OTHERS: [Kernel; 18] = [
        Kernel::Append(Source::Words),
        Kernel::Append(Source::Quads),
        Kernel::AppendInt8(1024, Source::Words),
        Kernel::AppendInt8(1024, Source::Quads),
        Kernel::AppendProjectInt8(1024, Source::Words),
        Kernel::AppendProjectInt8(1024, Source::Quads),
        Kernel::Copy,
        Kernel::Gather,
        Kernel::Scatter,
        Kernel::Merge,
        Kernel::MergeLong,
        Kernel::Fold,
        Kernel::Project,
        Kernel::ProjectInt8(1024),
        Kernel::Queries,
        Kernel::Score,
        Kernel::Fill,
        Kernel::Sum,
    ];

    pub(super) fn append(record: &Record, source: Source) -> Self {
        let native = record.format().dtype().map(|_| Kernel::Append(source));
        native.unwrap_or(Kernel::AppendInt8(channels(record), source))
    }

    /// The kernel that projects the keys it appends, of formats that have one.
    pub(super) fn append_project(record: &Record, source: Source) -> Option<Self> {
        record.format().is_quantized().then(|| Kernel::AppendProjectInt8(channels(record), source))
    }

    pub(super) fn project(record: &Record) -> Self {
        record.format().dtype().map_or(Kernel::ProjectInt8(channels(record)), |_| Kernel::Project)
    }

    pub(super) const fn spec(self) -> Spec {
        use Access::{Channels, Read, Write};
        use Slabs::{ReadHalves, ReadQuads, WriteQuads};
        match self {
            Kernel::Append(Source::Words) => append!("append", "source_words"),
            Kernel::Append(Source::Quads) => append!("append-quads", "source_quads"),
            Kernel::AppendInt8(_, Source::Words) => append_int8!("append-int8", "source_words"),
            Kernel::AppendInt8(_, Source::Quads) => append_int8!("append-int8-quads", "source_quads"),
            Kernel::AppendProjectInt8(_, Source::Words) => append_project_int8!("append-project-int8", "source_words"),
            Kernel::AppendProjectInt8(_, Source::Quads) => {
                append_project_int8!("append-project-int8-quads", "source_quads")
            }
            Kernel::Copy => spec!("copy", "transfer", [], Some(WriteQuads), ["params", "record", "transfer", "copy"]),
            Kernel::Gather => {
                spec!("gather", "transfer", [Write], Some(ReadQuads), ["params", "record", "transfer", "gather"])
            }
            Kernel::Scatter => {
                spec!("scatter", "transfer", [Read], Some(WriteQuads), ["params", "record", "transfer", "scatter"])
            }
            Kernel::Attend(shape) => shape.spec(),
            Kernel::Merge => spec!(
                "merge",
                "merge",
                [Read, Write, Write],
                None,
                ["params", "numeric", "softmax", "add", "merge_rows", "states", "merge"]
            ),
            Kernel::MergeLong => spec!(
                "merge-long",
                "merge",
                [Read, Write, Write],
                None,
                ["params", "numeric", "softmax", "add", "merge_rows", "states", "merge_long"]
            ),
            Kernel::Fold => spec!("fold", "fold", [Write], None, ["params", "softmax", "add", "states", "fold"]),
            Kernel::Project => spec!(
                "project",
                "project",
                [Read, Write],
                Some(ReadQuads),
                ["params", "record", "projections", "numeric", "project_run", "project", "project_native"]
            ),
            Kernel::ProjectInt8(_) => spec!(
                "project-int8",
                "project",
                [Read, Write, Channels],
                Some(ReadHalves),
                [
                    "params",
                    "record",
                    "projections",
                    "numeric",
                    "channels",
                    "codes",
                    "halves",
                    "restore",
                    "project_run",
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

    pub(super) const fn subgroups(self) -> bool {
        matches!(self, Kernel::Attend(shape) if shape.subgroups())
    }

    /// The channels that it is compiled for.
    pub(super) const fn channels(self) -> u32 {
        match self {
            Kernel::AppendInt8(channels, _)
            | Kernel::AppendProjectInt8(channels, _)
            | Kernel::ProjectInt8(channels) => channels,
            Kernel::Attend(shape) => shape.channels(),
            _ => 0,
        }
    }

    pub(super) fn constants(self) -> Vec<(&'static str, f64)> {
        match self {
            Kernel::Attend(shape) => shape.constants(),
            _ => Vec::new(),
        }
    }

    /// Slab bindings of the variant that handles this many slabs.
    pub(super) const fn slab_bindings(self, slabs: usize) -> u32 {
        if self.spec().slabs.is_some() { (slabs as u32).next_power_of_two() } else { 0 }
    }

    /// Storage buffers of the variant with this many slab bindings.
    pub(super) fn storage_buffers(self, slabs: u32) -> u32 {
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
}

/// KV heads × elements of a key.
pub(super) fn channels(record: &Record) -> u32 {
    record.geometry().kv_heads() * record.geometry().k_dim()
}
