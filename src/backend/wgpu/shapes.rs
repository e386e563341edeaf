//! What is `attend` compiled for?

use super::kernels::{Access, Slabs, Spec, channels, spec, wgsl};
use crate::PageFormat;
use crate::record::Record;
use std::fmt;

/// The kernel for native pages whose lanes add up as this file says.
macro_rules! native {
    ($lanes:literal, $fold:literal) => {
        spec!(
            "attend",
            "attend",
            [Access::Read, Access::Read, Access::Write],
            Some(Slabs::ReadQuads),
            [
                "params",
                "record",
                "numeric",
                "softmax",
                "add",
                "tiles",
                "outputs",
                $lanes,
                $fold,
                "attend",
                "attend_native"
            ]
        )
    };
}

/// The kernel for int8 pages.
macro_rules! int8 {
    ($lanes:literal, $fold:literal) => {
        spec!(
            "attend",
            "attend",
            [Access::Read, Access::Read, Access::Write, Access::Channels],
            Some(Slabs::ReadHalves),
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
                $lanes,
                $fold,
                "attend",
                "attend_int8"
            ]
        )
    };
}

/// Bytes of workgroup memory of the largest kernel; `tests/shaders.rs` checks that none uses more.
#[doc(hidden)]
pub const WORKGROUP_BYTES: u32 = (768 + 256) * 16;
/// Rows that have kernels of their own.
const DIMS: [u32; 2] = [64, 128];
/// The fewest threads of a subgroup of processors that hide what loads take behind other loads.
const DEEP_SUBGROUP: u32 = 8;

/// What a device is to `attend`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Processor {
    /// The fewest threads that a subgroup has; 0 without subgroups.
    pub(super) subgroup: u32,
    /// Whether common dims have kernels of their own. Software adapters take seconds to compile each of them.
    pub(super) own_kernels: bool,
}

/// What the text and the constants of a kernel of `attend` depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct AttendShape {
    format: PageFormat,
    /// Elements of both keys and values, or 0 for any.
    dim: u32,
    /// KV heads × elements of a key, where the format has [channels](Access::Channels).
    channels: u32,
    /// Whether the lanes of a row add up by shuffles, or through workgroup memory.
    subgroups: bool,
    /// Whether those of two rows of values fold by shuffles.
    pairs: bool,
    /// Whether lanes load eight rows at once, or four.
    deep: bool,
}

/// Threads that share a row of so many elements.
fn lanes(dim: u32) -> u32 {
    (dim / 8).next_power_of_two().max(4)
}

impl AttendShape {
    /// The kernel for these pages.
    pub(super) fn new(record: &Record, processor: Processor) -> Self {
        let (geometry, format) = (record.geometry(), record.format());
        let (k_dim, v_dim) = (geometry.k_dim(), geometry.v_dim());
        let own = processor.own_kernels && k_dim == v_dim && DIMS.contains(&k_dim);
        let subgroups = lanes(k_dim) <= processor.subgroup;
        AttendShape {
            format,
            dim: if own { k_dim } else { 0 },
            channels: if format.is_quantized() { channels(record) } else { 0 },
            subgroups,
            pairs: subgroups && 2 * lanes(v_dim) <= processor.subgroup,
            deep: own && subgroups && processor.subgroup >= DEEP_SUBGROUP,
        }
    }

    pub(super) const fn channels(self) -> u32 {
        self.channels
    }

    pub(super) const fn subgroups(self) -> bool {
        self.subgroups
    }

    pub(super) const fn spec(self) -> Spec {
        match (self.format.is_quantized(), self.subgroups, self.pairs) {
            (false, false, _) => native!("lanes_workgroup", "fold_workgroup"),
            (false, true, false) => native!("lanes_subgroup", "fold_workgroup"),
            (false, true, true) => native!("lanes_subgroup", "fold_subgroup"),
            (true, false, _) => int8!("lanes_workgroup", "fold_workgroup"),
            (true, true, false) => int8!("lanes_subgroup", "fold_workgroup"),
            (true, true, true) => int8!("lanes_subgroup", "fold_subgroup"),
        }
    }

    /// Elements of a query that a kernel has room for.
    pub(super) const fn asked(self) -> u32 {
        if self.dim > 0 { self.dim } else { 256 }
    }

    pub(super) fn constants(self) -> Vec<(&'static str, f64)> {
        let lanes = if self.dim > 0 { lanes(self.dim) } else { 0 };
        let mut constants = vec![
            ("only_dim", self.dim.into()),
            ("only_lanes", lanes.into()),
            ("lane_rows", if self.deep { 8.0 } else { 4.0 }),
        ];
        constants.extend(self.format.dtype().map(|dtype| ("page_format", dtype.code().into())));
        constants
    }

    /// Some of each kind, for tests of texts.
    pub(super) fn examples() -> Vec<Self> {
        let shape = |format: PageFormat, dim, [subgroups, pairs, deep]: [bool; 3]| {
            let channels = if format.is_quantized() { 1024 } else { 0 };
            AttendShape { format, dim, channels, subgroups, pairs, deep }
        };
        let of = |format| {
            [
                shape(format, 0, [false, false, false]),
                shape(format, 128, [false, false, false]),
                shape(format, 0, [true, false, false]),
                shape(format, 64, [true, false, true]),
                shape(format, 0, [true, true, false]),
                shape(format, 128, [true, true, true]),
            ]
        };
        PageFormat::ALL.into_iter().flat_map(of).collect()
    }
}

impl fmt::Display for AttendShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-", self.format.name())?;
        match self.dim {
            0 => f.write_str("any")?,
            dim => write!(f, "{dim}")?,
        }
        f.write_str(match (self.subgroups, self.pairs) {
            (false, _) => "",
            (true, false) => "-subgroups",
            (true, true) => "-pairs",
        })
    }
}
