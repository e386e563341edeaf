//! How is `attend` launched? A block for each work item, KV head and group of query vectors.

use super::kernels::{ArenaArg, Descriptors, Kernels, arg, channels_address, function};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::attention::{Grain, SECTION, SPLIT, state_words};
use crate::backend::ops::{Attend, StepMemory};
use crate::backend::params::AttendParams;
use crate::record::Record;
use crate::{Dtype, Error, PageFormat, Result};
use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED_BYTES;
use cudarc::driver::{CudaFunction, CudaModule};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// Query vectors (row × head) that a block can be compiled for, in ascending order. Which one runs changes no bit of the
/// result.
pub(super) const QUERY_TILES: [u32; 3] = [1, 4, 8];

// What the kernels are compiled for: `SPLIT` of `kernels/tiles.cuh` and `SECTION` of `kernels/fold.cuh`.
const _: () = assert!(SPLIT == 256 && SECTION == 4);

/// `THREADS` of `kernels/attend.cu`.
const THREADS: u32 = 128;

/// What `kernels/attend_mma.cu` and `attend_mma_int8.cu` are compiled for, for keys and values alike.
const MMA_DIMS: [u32; 2] = [64, 128];
/// The formats of both.
const MMA_FORMATS: [PageFormat; 3] = [PageFormat::F16, PageFormat::Bf16, PageFormat::Int8];
/// A warp for a split there or one for each of its groups, a warp for a section or one for each of its splits: the ends of the
/// functions' names, and the warps of a block.
const MMA_KINDS: [(&str, u32); 4] = [("1", 1), ("4", 4), ("section_1", 1), ("section_4", 4)];
/// `PREFILL_KINDS` of `kernels/attend_prefill.cu`: warps of a block and its bytes of shared memory, the larger first.
const PREFILL_KINDS: [(u32, u32); 2] = [(8, 166_912), (4, 101_376)];
/// Query vectors of a warp there: `TILES` × `COLUMNS`.
const PREFILL_VECTORS: u32 = 16;
/// Query vectors of a tile from which on that is what computes.
const PREFILL_FROM: u64 = 64;
/// `RING_BYTES` of `kernels/ring.cuh`.
const RING_BYTES: u32 = 24576;
/// `COLUMNS` of `kernels/columns.cuh`.
const COLUMNS: u32 = 8;

/// `AttendDescriptors` of `kernels/tiles.cuh`.
const ATTEND_WORDS: usize = 768;

/// The functions that compute attention.
pub(super) struct AttendFunctions {
    /// Of `attend.cu`, by the code of the page's format, then by query tile.
    any: Vec<[CudaFunction; QUERY_TILES.len()]>,
    /// Of `attend_mma.cu` and, last, `attend_mma_int8.cu`, by elements of a head, then by kind.
    mma: [[[CudaFunction; MMA_KINDS.len()]; MMA_DIMS.len()]; MMA_FORMATS.len()],
    /// Of `attend_prefill.cu`, where the device can run it.
    prefill: Option<PrefillFunctions>,
}

/// By the native ones of `MMA_FORMATS`, then by elements of a head.
struct PrefillFunctions {
    functions: [[CudaFunction; MMA_DIMS.len()]; 2],
    warps: u32,
    shared: u32,
}

/// The kind for devices whose blocks have up to `shared` bytes of shared memory.
fn prefill_kind(shared: u64) -> Option<(u32, u32)> {
    PREFILL_KINDS.into_iter().find(|&(_, bytes)| u64::from(bytes) <= shared)
}

/// [`Caps::prefill`](crate::backend::Caps::prefill) of such devices.
pub(super) fn prefill_of(shared: u64) -> fn(&Record, Dtype) -> Option<u32> {
    fn vectors(record: &Record, q: Dtype, warps: u32) -> Option<u32> {
        let native = record.format().dtype() == Some(q);
        (native && mma_of(record, q).is_some()).then_some(warps * PREFILL_VECTORS)
    }
    match prefill_kind(shared) {
        Some((8, _)) => |record, q| vectors(record, q, 8),
        Some(_) => |record, q| vectors(record, q, 4),
        None => |_, _| None,
    }
}

/// Where the functions on tensor cores that take these pages and queries are. They round neither: over native pages a query is
/// what a page could hold, so its type must be the page's.
fn mma_of(record: &Record, q: Dtype) -> Option<(usize, usize)> {
    let format = MMA_FORMATS.iter().position(|&format| format == record.format())?;
    if record.format().dtype().is_some_and(|dtype| dtype != q) {
        return None;
    }
    let geometry = record.geometry();
    let dim = MMA_DIMS.iter().position(|&dim| [geometry.k_dim(), geometry.v_dim()] == [dim; 2])?;
    Some((format, dim))
}

/// A function and what a block of it is.
struct Choice<'a> {
    function: &'a CudaFunction,
    query_tile: u32,
    threads: u32,
    shared: u32,
}

impl AttendFunctions {
    /// The modules of the four files; `shared` is how many bytes of shared memory a block may have.
    pub(super) fn load([any, mma, mma_int8, prefill]: [&Arc<CudaModule>; 4], shared: u64) -> Result<Self> {
        let with_shared = |module, name: &str, bytes: u32| {
            let function = function(module, name)?;
            let set = function.set_attribute(SHARED_BYTES, bytes as i32);
            set.map_err(super::failed("cuFuncSetAttribute")).map(|()| function)
        };
        let by_tile = |format: PageFormat| {
            let [a, b, c] = QUERY_TILES.map(|q| function(any, &format!("attend_{}_{q}", format.name())));
            Ok([a?, b?, c?])
        };
        let by_kind = |format: PageFormat, dim: u32| {
            let module = if format.is_quantized() { mma_int8 } else { mma };
            let load = |(kind, warps): (&str, u32)| {
                with_shared(module, &format!("attend_{}_{dim}_{kind}", format.name()), warps * RING_BYTES)
            };
            let [a, b, c, d] = MMA_KINDS.map(load);
            Ok::<_, Error>([a?, b?, c?, d?])
        };
        let by_dim = |format| {
            let [small, large] = MMA_DIMS.map(|dim| by_kind(format, dim));
            Ok::<_, Error>([small?, large?])
        };
        let any = PageFormat::ALL.into_iter().map(by_tile).collect::<Result<_>>()?;
        let [f16, bf16, int8] = MMA_FORMATS.map(by_dim);
        let prefill = prefill_kind(shared).map(|(warps, shared)| {
            let load = |format: PageFormat, dim| {
                with_shared(prefill, &format!("attend_prefill_{}_{dim}_{warps}", format.name()), shared)
            };
            let [f16, bf16] = [PageFormat::F16, PageFormat::Bf16].map(|format| {
                let [small, large] = MMA_DIMS.map(|dim| load(format, dim));
                Ok::<_, Error>([small?, large?])
            });
            Ok::<_, Error>(PrefillFunctions { functions: [f16?, bf16?], warps, shared })
        });
        Ok(AttendFunctions { any, mma: [f16?, bf16?, int8?], prefill: prefill.transpose()? })
    }

    /// The function for tiles of up to `vectors` query vectors, more than a block takes being several blocks. Which of the
    /// files computes follows from the pages' format and dims and the queries' type alone; the rest changes no bit.
    fn choose(
        &self,
        record: &Record,
        q: Dtype,
        grain: Grain,
        vectors: u64,
        blocks: impl FnOnce(u32) -> u64,
        processors: u64,
    ) -> Choice<'_> {
        if let Some((format, dim)) = mma_of(record, q) {
            let many = grain == Grain::Whole || vectors >= PREFILL_FROM;
            if let Some(prefill) = self.prefill.as_ref().filter(|prefill| many && format < prefill.functions.len()) {
                let (function, query_tile) = (&prefill.functions[format][dim], prefill.warps * PREFILL_VECTORS);
                return Choice { function, query_tile, threads: 32 * prefill.warps, shared: prefill.shared };
            }
            let functions = &self.mma[format][dim];
            // With no more blocks than run at a time, one warp each would leave much of the device idle.
            let kind = match (grain, blocks(COLUMNS)) {
                (Grain::Split, blocks) => usize::from(blocks <= 2 * processors),
                (_, blocks) => 2 + usize::from(blocks < 3 * processors),
            };
            let (function, warps) = (&functions[kind], MMA_KINDS[kind].1);
            return Choice { function, query_tile: COLUMNS, threads: 32 * warps, shared: warps * RING_BYTES };
        }
        let last = QUERY_TILES.len() - 1;
        let tile = QUERY_TILES.iter().position(|&q| u64::from(q) >= vectors).unwrap_or(last);
        let function = &self.any[record.format().code() as usize][tile];
        Choice { function, query_tile: QUERY_TILES[tile], threads: THREADS, shared: 0 }
    }
}

/// Launches a validated attend, of a decode step where its descriptors lie in memory.
pub(super) fn attend(
    kernels: &Kernels,
    stream: &mut CudaStream,
    args: &Attend<'_, CudaMemory>,
    at: Option<&StepMemory<'_, CudaMemory>>,
) -> Result<()> {
    let Some(last) = args.tiles.last() else { return Ok(()) };
    let arena = ArenaArg::new(&args.arena)?;
    let states = args.states.aligned("the address of the states")?;
    let geometry = args.record.geometry();
    let rows = args.tiles.iter().map(|tile| tile.rows).max().unwrap_or(0);
    let vectors = u64::from(rows) * u64::from(geometry.group());
    let items = last.item + last.splits;
    let blocks =
        |query_tile: u32| u64::from(items) * u64::from(geometry.kv_heads()) * vectors.div_ceil(query_tile.into());
    let choice =
        kernels.attend.choose(&args.record, args.q.dtype, args.grain, vectors, blocks, kernels.multiprocessors);
    let vector_tiles = vectors.div_ceil(choice.query_tile.into());
    let vector_tiles = u32::try_from(vector_tiles).map_err(|_| Error::TooLarge {
        what: "the query vectors of a tile",
        value: vectors,
        maximum: u64::from(u32::MAX) * u64::from(choice.query_tile),
    })?;
    let tiles = super::count(args.tiles.len(), "the number of tiles")?;
    let (tiles_at, rows_at) = at.map_or((0, tiles * 8), |at| ((at.tiles / 4) as u32, (at.rows / 4) as u32));
    let params = AttendParams {
        record: args.record.params(args.arena.slab_shift),
        q: args.q.params(0),
        q_dtype: args.q.dtype.code(),
        q_heads: geometry.q_heads(),
        group: geometry.group(),
        split_shift: args.grain.tokens().trailing_zeros(),
        scale_log2: args.scale * LOG2_E,
        tiles_at,
        tiles,
        rows_at,
        items,
        state_words: state_words(geometry.v_dim()),
        query_tile: choice.query_tile,
        first_item: 0,
    };
    let descriptors: Descriptors<ATTEND_WORDS> = match at {
        Some(at) => Descriptors::at(at.buffer.address()),
        None => stream.descriptors_of(&[bytemuck::cast_slice(args.tiles), bytemuck::cast_slice(args.rows)])?,
    };
    let tables = args.tables.address();
    let q = args.q.buffer.at(args.q.offset);
    let channels = channels_address(args.channels)?;
    let list = &mut [
        arg(&params),
        arg(&tables),
        arg(&q),
        arg(&channels),
        arg(&states),
        arg(&vector_tiles),
        arg(&arena),
        arg(&descriptors),
    ];
    let block = (choice.threads, choice.shared);
    // SAFETY: the parameters of every `attend_…` in kernels/attend.cu and attend_….cu; tiles, rows, queries, channels and
    // states were validated, and table entries are the store's to keep valid. The first thing that a block does is to wait.
    unsafe { kernels.launch_early(choice.function, stream, blocks(choice.query_tile), block, list) }
}
