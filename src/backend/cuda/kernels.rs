//! Where do the kernels come from, and how are they launched? The fatbins that `build.rs` made, and their functions.

use super::driver::{failed, unavailable};
use super::memory::CudaMemory;
use super::stream::CudaStream;
use crate::backend::ops::{Arena, Channels};
use crate::{PageFormat, Result};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, DriverError, result, sys};
use cudarc::nvrtc::Ptx;
use std::ffi::c_void;
use std::sync::Arc;

/// Slabs that one arena may have: `MAX_SLABS` of `kernels/record.cuh`.
pub(super) const MAX_SLABS: usize = 64;

/// Query vectors (row × head) that a block of `attend` can be compiled for, in ascending order. Which one runs changes
/// no bit of the result.
pub(super) const QUERY_TILES: [u32; 3] = [1, 4, 8];

/// What the kernels were compiled for.
const CODE: &str = env!("KVTIDE_CUDA_CODE");

macro_rules! fatbin {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin"))
    };
}

/// Checks that there are kernels at all.
pub(super) fn compiled() -> Result<()> {
    if cfg!(kvtide_no_kernels) {
        return Err(unavailable(
            "built without kernels: nvcc was not found when kvtide was compiled; set NVCC or CUDA_HOME and build again",
        ));
    }
    Ok(())
}

/// The functions of one context.
pub(super) struct Kernels {
    pub(super) append: CudaFunction,
    pub(super) append_int8: CudaFunction,
    pub(super) transfer: CudaFunction,
    pub(super) sum: CudaFunction,
    pub(super) merge: CudaFunction,
    pub(super) fold: CudaFunction,
    pub(super) project: CudaFunction,
    pub(super) append_project: CudaFunction,
    pub(super) project_queries: CudaFunction,
    pub(super) score: CudaFunction,
    /// By the code of the page's format, then by query tile.
    attend: Vec<[CudaFunction; QUERY_TILES.len()]>,
}

impl Kernels {
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Self> {
        compiled()?;
        let refused = |error: DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | sys::CUresult::CUDA_ERROR_INVALID_PTX
            | sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                unavailable(format!("the kernels were compiled for {CODE}, which this device or driver does not run"))
            }
            _ => failed("cuModuleLoadData")(error),
        };
        let module = |fatbin: &[u8]| context.load_module(Ptx::from_binary(fatbin.to_vec())).map_err(refused);
        let function =
            |module: &Arc<CudaModule>, name: &str| module.load_function(name).map_err(failed("cuModuleGetFunction"));
        let append = module(fatbin!("append"))?;
        let (attend, merge) = (module(fatbin!("attend"))?, module(fatbin!("merge"))?);
        let (project, score) = (module(fatbin!("project"))?, module(fatbin!("score"))?);
        let by_tile = |format: PageFormat| {
            let [a, b, c] = QUERY_TILES.map(|q| function(&attend, &format!("attend_{}_{q}", format.name())));
            Ok([a?, b?, c?])
        };
        Ok(Kernels {
            append: function(&append, "append")?,
            append_int8: function(&append, "append_int8")?,
            transfer: function(&module(fatbin!("transfer"))?, "transfer")?,
            sum: function(&module(fatbin!("sum"))?, "sum")?,
            merge: function(&merge, "merge")?,
            fold: function(&merge, "fold")?,
            project: function(&project, "project")?,
            append_project: function(&project, "append_project")?,
            project_queries: function(&score, "project_queries")?,
            score: function(&score, "score")?,
            attend: PageFormat::ALL.into_iter().map(by_tile).collect::<Result<_>>()?,
        })
    }

    /// The function for pages of a format and up to `vectors` query vectors a block (more take several blocks), and the
    /// vectors that a block of it takes.
    pub(super) fn attend(&self, format: PageFormat, vectors: u64) -> (&CudaFunction, u32) {
        let last = QUERY_TILES.len() - 1;
        let tile = QUERY_TILES.iter().position(|&q| u64::from(q) >= vectors).unwrap_or(last);
        (&self.attend[format.code() as usize][tile], QUERY_TILES[tile])
    }
}

/// `Arena` of `kernels/record.cuh`: the slabs' addresses, passed by value.
#[repr(C)]
pub(super) struct ArenaArg {
    slabs: [sys::CUdeviceptr; MAX_SLABS],
    slab_shift: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<ArenaArg>() == 520);

impl ArenaArg {
    /// The slabs of a validated arena.
    pub(super) fn new(arena: &Arena<'_, CudaMemory>) -> Result<Self> {
        let mut arg = Self::of_records(0);
        arg.slab_shift = arena.slab_shift;
        for (address, slab) in arg.slabs.iter_mut().zip(arena.slabs) {
            *address = slab.aligned("the address of a slab")?;
        }
        Ok(arg)
    }

    /// A buffer of records in the place of an arena.
    pub(super) const fn of_records(address: sys::CUdeviceptr) -> Self {
        let mut slabs = [0; MAX_SLABS];
        slabs[0] = address;
        ArenaArg { slabs, slab_shift: 0, reserved: 0 }
    }
}

/// The address of a layer's channels, which kernels read 16 bytes at a time; 0 where pages have none.
pub(super) fn channels_address(channels: Option<Channels<'_, CudaMemory>>) -> Result<sys::CUdeviceptr> {
    match channels {
        Some(channels) => Ok(channels.buffer.aligned("the address of the key calibration")? + channels.offset),
        None => Ok(0),
    }
}

/// Words of descriptors that travel with a launch: `INLINE_WORDS` of `kernels/descriptors.cuh`.
const INLINE_WORDS: usize = 640;

/// `Descriptors` of `kernels/descriptors.cuh`: rows that a launch works through, in its parameters or in memory.
#[repr(C)]
pub(super) struct Descriptors {
    at: sys::CUdeviceptr,
    words: [u32; INLINE_WORDS],
}

const _: () = assert!(size_of::<Descriptors>() == 8 + 4 * INLINE_WORDS);

impl Descriptors {
    /// The parts one after the other, where they are few; else they go to where `upload` says.
    pub(super) fn new(parts: &[&[u32]], upload: impl FnOnce(&[&[u32]]) -> Result<sys::CUdeviceptr>) -> Result<Self> {
        let mut words = [0; INLINE_WORDS];
        let mut rest = &mut words[..];
        for part in parts {
            let Some((here, behind)) = rest.split_at_mut_checked(part.len()) else {
                return Ok(Descriptors { at: upload(parts)?, words: [0; INLINE_WORDS] });
            };
            here.copy_from_slice(part);
            rest = behind;
        }
        Ok(Descriptors { at: 0, words })
    }
}

/// A kernel argument.
pub(super) fn arg<T>(value: &T) -> *mut c_void {
    (&raw const *value).cast_mut().cast()
}

/// Launches a kernel. Kernels loop over their work, so more blocks than a grid can have are simply fewer.
///
/// # Safety
/// `args` are the kernel's parameters in order and by type, and every address that it forms from them lies in memory of
/// the stream's context that outlives the kernel.
pub(super) unsafe fn launch(
    function: &CudaFunction,
    stream: &CudaStream,
    blocks: u64,
    threads: u32,
    args: &mut [*mut c_void],
) -> Result<()> {
    let blocks = blocks.min(i32::MAX as u64) as u32;
    if blocks == 0 {
        return Ok(());
    }
    // SAFETY: the caller vouches for the arguments; the function is loaded, and the stream live, in the same context.
    unsafe { result::launch_kernel(function.cu_function(), (blocks, 1, 1), (threads, 1, 1), 0, stream.raw(), args) }
        .map_err(failed("cuLaunchKernel"))
}
