//! What is `attend` compiled for?

use super::kernels::{Access, Slabs, Spec, channels, spec, wgsl};
use crate::PageFormat;
use crate::record::Record;
use std::fmt;

/// The kernel for native pages whose lanes add up as this file says.
macro_rules! native {
    ($lanes:literal) => {
        spec!(
            "attend",
            "attend",
            [Access::Read, Access::Read, Access::Write],
            Some(Slabs::ReadQuads),
            ["params", "record", "numeric", "softmax", "add", "tiles", "outputs", $lanes, "attend", "attend_native"]
        )
    };
}

/// The kernel for int8 pages.
macro_rules! int8 {
    ($lanes:literal) => {
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
                "attend",
                "attend_int8"
            ]
        )
    };
}

/// Bytes of workgroup memory of the largest kernel; `tests/shaders.rs` checks that none uses more.
#[doc(hidden)]
pub const WORKGROUP_BYTES: u32 = (768 + 256) * 16;
/// Most elements of a key that eight queries have room for in `asked` of `shaders/attend.wgsl`.
const WIDE_K_DIM: u32 = 128;

/// What the text and the constants of a kernel of `attend` depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct AttendShape {
    format: PageFormat,
    /// Elements of both keys and values, or 0 for any.
    dim: u32,
    /// KV heads × elements of a key, where the format has [channels](Access::Channels).
    channels: u32,
    /// Whether a workgroup takes eight query vectors and not four.
    wide: bool,
    /// Whether lanes add up by shuffles, or through workgroup memory.
    subgroups: bool,
    /// Whether lanes load eight rows at once, or four.
    deep: bool,
}

/// The fewest threads of a subgroup of processors that hide what loads take behind other loads. Those that have fewer are
/// mostly not GPUs, and take seconds to compile kernels of so many loads.
const DEEP_SUBGROUP: u32 = 16;
/// Rows that have kernels of their own; one for all others takes seconds less to compile on some adapters than one for each.
const DIMS: [u32; 3] = [64, 128, 256];

/// Threads that share a row of so many elements.
fn lanes(dim: u32) -> u32 {
    (dim / 8).next_power_of_two().max(4)
}

impl AttendShape {
    /// The kernel for these pages on a device whose subgroups have at least so many threads, 0 where it has none.
    pub(super) fn new(record: &Record, subgroup: u32) -> Self {
        let (geometry, format) = (record.geometry(), record.format());
        let channels = if format.is_quantized() { channels(record) } else { 0 };
        let subgroups = lanes(geometry.k_dim()) <= subgroup && tuning().subgroups;
        let wide = subgroups && geometry.group() > 4 && geometry.k_dim() <= WIDE_K_DIM && tuning().wide;
        let own = DIMS.contains(&geometry.k_dim()) && geometry.k_dim() == geometry.v_dim();
        let (dim, deep) = (if own { geometry.k_dim() } else { 0 }, own && subgroups && subgroup >= DEEP_SUBGROUP);
        AttendShape { format, dim, channels, wide, subgroups, deep }
    }

    /// Query vectors of a workgroup.
    pub(super) const fn query_tile(self) -> u32 {
        if self.wide { 8 } else { 4 }
    }

    pub(super) const fn channels(self) -> u32 {
        self.channels
    }

    pub(super) const fn subgroups(self) -> bool {
        self.subgroups
    }

    pub(super) const fn spec(self) -> Spec {
        match (self.format.is_quantized(), self.subgroups) {
            (false, false) => native!("lanes_workgroup"),
            (false, true) => native!("lanes_subgroup"),
            (true, false) => int8!("lanes_workgroup"),
            (true, true) => int8!("lanes_subgroup"),
        }
    }

    pub(super) fn constants(self) -> Vec<(&'static str, f64)> {
        let (lanes, rows) =
            (if self.dim > 0 { lanes(self.dim) } else { 0 }, |deep| if deep && self.deep { 8 } else { 4 });
        let mut constants = vec![
            ("only_k_dim", self.dim.into()),
            ("only_v_dim", self.dim.into()),
            ("only_k_lanes", lanes.into()),
            ("only_v_lanes", lanes.into()),
            ("key_rows", rows(tuning().deep_keys).into()),
            ("value_rows", rows(tuning().deep_values).into()),
            ("wide", u32::from(self.wide).into()),
        ];
        constants.extend(self.format.dtype().map(|dtype| ("page_format", dtype.code().into())));
        constants
    }

    /// Some of each kind, for tests of texts.
    pub(super) fn examples() -> Vec<Self> {
        let shape = |format: PageFormat, dim, wide, subgroups| {
            let channels = if format.is_quantized() { 1024 } else { 0 };
            AttendShape { format, dim, channels, wide, subgroups, deep: wide }
        };
        let of = |format| {
            [
                shape(format, 0, false, false),
                shape(format, 128, false, false),
                shape(format, 0, false, true),
                shape(format, 128, true, true),
            ]
        };
        PageFormat::ALL.into_iter().flat_map(of).collect()
    }
}

impl fmt::Display for AttendShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-", self.format.name())?;
        if self.dim > 0 {
            write!(f, "{}-", self.dim)?;
        }
        write!(f, "{}{}", self.query_tile(), if self.subgroups { "-subgroups" } else { "" })
    }
}

/// What only a card can decide.
// TUNING, to be removed
#[derive(Debug, Clone, Copy)]
pub(super) struct Tuning {
    pub(super) deep_keys: bool,
    pub(super) deep_values: bool,
    pub(super) wide: bool,
    pub(super) subgroups: bool,
    pub(super) at_once: Option<u64>,
}

// TUNING, to be removed
pub(super) fn tuning() -> Tuning {
    let read = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    Tuning {
        deep_keys: read("KVTIDE_WGSL_KEY_ROWS").unwrap_or(8) == 8,
        deep_values: read("KVTIDE_WGSL_VALUE_ROWS").unwrap_or(8) == 8,
        wide: read("KVTIDE_WGSL_WIDE").unwrap_or(1) == 1,
        subgroups: read("KVTIDE_WGSL_SUBGROUPS").unwrap_or(1) == 1,
        at_once: read("KVTIDE_WGSL_AT_ONCE"),
    }
}
