//! Where do the kernels come from, and how are they launched? The fatbins that `build.rs` made, and their functions.

use super::attend::AttendFunctions;
use super::driver::{failed, unavailable};
use super::memory::CudaMemory;
use super::merge::MERGE_BATCHES;
use super::stream::CudaStream;
use crate::Result;
use crate::backend::ops::{Arena, Channels};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, DriverError, result, sys};
use cudarc::nvrtc::Ptx;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// Slabs that one arena may have: `MAX_SLABS` of `kernels/record.cuh`.
pub(super) const MAX_SLABS: usize = 64;

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
    pub(super) append_next: CudaFunction,
    pub(super) append_next_int8: CudaFunction,
    pub(super) transfer: CudaFunction,
    pub(super) sum: CudaFunction,
    /// By [`MERGE_BATCHES`].
    pub(super) merge: [CudaFunction; MERGE_BATCHES.len()],
    pub(super) merge_long: CudaFunction,
    pub(super) fold: CudaFunction,
    /// By [`PageFormat::code`](crate::PageFormat::code).
    pub(super) project: [CudaFunction; 4],
    pub(super) append_project: [CudaFunction; 4],
    pub(super) project_queries: CudaFunction,
    pub(super) score: CudaFunction,
    pub(super) attend: AttendFunctions,
    /// Blocks that run at a time come in multiples of this.
    pub(super) multiprocessors: u64,
    /// Whether a kernel may come before the one ahead of it has ended: from compute capability 9 on.
    early: bool,
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
        let append = module(fatbin!("append"))?;
        let merge = module(fatbin!("merge"))?;
        let (project, score) = (module(fatbin!("project"))?, module(fatbin!("score"))?);
        let [first, second, third] = MERGE_BATCHES.map(|batch| function(&merge, &format!("merge_{batch}")));
        let limit = |attribute| context.attribute(attribute).map_err(failed("cuDeviceGetAttribute"));
        let attend = [
            &module(fatbin!("attend"))?,
            &module(fatbin!("attend_mma"))?,
            &module(fatbin!("attend_mma_int8"))?,
            &module(fatbin!("attend_prefill"))?,
        ];
        let shared = limit(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        Ok(Kernels {
            append: function(&append, "append")?,
            append_int8: function(&append, "append_int8")?,
            append_next: function(&append, "append_next")?,
            append_next_int8: function(&append, "append_next_int8")?,
            transfer: function(&module(fatbin!("transfer"))?, "transfer")?,
            sum: function(&module(fatbin!("sum"))?, "sum")?,
            merge: [first?, second?, third?],
            merge_long: function(&merge, "merge_long")?,
            fold: function(&merge, "fold")?,
            project: by_format(&project, "project")?,
            append_project: by_format(&project, "append_project")?,
            project_queries: function(&score, "project_queries")?,
            score: function(&score, "score")?,
            attend: AttendFunctions::load(attend, u64::try_from(shared).unwrap_or(0))?,
            multiprocessors: limit(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1) as u64,
            early: limit(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? >= 9,
        })
    }
}

/// A function of a module.
pub(super) fn function(module: &Arc<CudaModule>, name: &str) -> Result<CudaFunction> {
    module.load_function(name).map_err(failed("cuModuleGetFunction"))
}

/// The functions of a module for each format of pages, by its code.
fn by_format(module: &Arc<CudaModule>, name: &str) -> Result<[CudaFunction; 4]> {
    let [f32, f16, bf16, int8] =
        ["f32", "f16", "bf16", "int8"].map(|format| function(module, &format!("{name}_{format}")));
    Ok([f32?, f16?, bf16?, int8?])
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

/// Words of descriptors that travel with most launches: `INLINE_WORDS` of `kernels/descriptors.cuh`.
const INLINE_WORDS: usize = 640;

/// `Descriptors` of `kernels/descriptors.cuh`: rows that a launch works through, in its parameters or in memory.
#[repr(C)]
pub(super) struct Descriptors<const WORDS: usize = INLINE_WORDS> {
    at: sys::CUdeviceptr,
    words: [u32; WORDS],
}

const _: () = assert!(size_of::<Descriptors<INLINE_WORDS>>() == 8 + 4 * INLINE_WORDS);

impl<const WORDS: usize> Descriptors<WORDS> {
    /// Those that lie in memory.
    pub(super) const fn at(address: sys::CUdeviceptr) -> Self {
        Descriptors { at: address, words: [0; WORDS] }
    }

    /// The parts one after the other, where they are few; else they go to where `upload` says.
    pub(super) fn new(parts: &[&[u32]], upload: impl FnOnce(&[&[u32]]) -> Result<sys::CUdeviceptr>) -> Result<Self> {
        let mut words = [0; WORDS];
        let mut rest = &mut words[..];
        for part in parts {
            let Some((here, behind)) = rest.split_at_mut_checked(part.len()) else {
                return upload(parts).map(Self::at);
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
    // SAFETY: the caller vouches for what is asked here.
    unsafe { launch_with(function, stream, blocks, (threads, 0), args) }
}

/// The same with bytes of shared memory for each block, beside its threads.
///
/// # Safety
/// As for [`launch`].
unsafe fn launch_with(
    function: &CudaFunction,
    stream: &CudaStream,
    blocks: u64,
    (threads, shared): (u32, u32),
    args: &mut [*mut c_void],
) -> Result<()> {
    let Some(blocks) = grid(blocks) else { return Ok(()) };
    // SAFETY: the caller vouches for the arguments; the function is loaded, and the stream live, in the same context.
    unsafe {
        result::launch_kernel(function.cu_function(), (blocks, 1, 1), (threads, 1, 1), shared, stream.raw(), args)
    }
    .map_err(failed("cuLaunchKernel"))
}

fn grid(blocks: u64) -> Option<u32> {
    Some(blocks.min(i32::MAX as u64) as u32).filter(|&blocks| blocks > 0)
}

impl Kernels {
    /// Launches a kernel whose blocks may come while the kernel ahead of it ends, where the device can do that.
    ///
    /// # Safety
    /// As for [`launch`]; and every block waits (`await_previous` of `kernels/ptx.cuh`) before it touches memory that a
    /// kernel may have written.
    pub(super) unsafe fn launch_early(
        &self,
        function: &CudaFunction,
        stream: &CudaStream,
        blocks: u64,
        (threads, shared): (u32, u32),
        args: &mut [*mut c_void],
    ) -> Result<()> {
        if !self.early {
            // SAFETY: the caller vouches for it.
            return unsafe { launch_with(function, stream, blocks, (threads, shared), args) };
        }
        let Some(blocks) = grid(blocks) else { return Ok(()) };
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream.raw(),
            attrs: &raw mut early,
            numAttrs: 1,
        };
        // SAFETY: as in `launch_with`; the attribute lives until the call returns.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function.cu_function(), args.as_mut_ptr(), null_mut()) }
            .result()
            .map_err(failed("cuLaunchKernelEx"))
    }
}
