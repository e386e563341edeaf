//! How do pages get to host memory and back? Scattered ones by a small kernel that reaches over the link, long runs by the
//! copy engine.

use super::driver::failed;
use super::kernels::Kernels;
use super::memory::{CudaMemory, Pinned};
use super::stream::CudaStream;
use super::transfer::{Side, run};
use crate::Result;
use crate::backend::ops::split_frame;
use crate::backend::params::Move;
use crate::backend::{DeviceId, HostMemory, Swap, by_host, sides};
use crate::record::{FILE_ALIGN, Record};
use cudarc::driver::{CudaContext, sys};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// Blocks of the kernel: enough to fill the link, few enough to leave the processors to attention.
const BLOCKS: u64 = 32;
/// Bytes of a run from which on the copy engine takes it: a call costs it what a sixteenth of this takes on the link, which
/// is as much as it gains on the kernel.
const LONG_RUN: u64 = 4 << 20;

/// A handle to pinned host memory, which the device reaches at its own address; both kinds of use are the same.
///
/// It is freed with the last handle, once everything enqueued in the context has finished.
#[derive(Clone)]
pub struct CudaHost {
    memory: Arc<Pinned>,
    /// Held while the host copies, so that threads do not race.
    copying: Arc<RwLock<()>>,
    bytes: u64,
    device: DeviceId,
}

impl fmt::Debug for CudaHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaHost({} bytes at {:?})", self.bytes, self.memory.start())
    }
}

impl HostMemory for CudaHost {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let bytes = self.bytes as usize;
        Arc::get_mut(&mut self.memory).map(|memory| &mut memory.as_mut()[..bytes])
    }
}

impl CudaHost {
    /// New memory, rounded up to whole words; whole pages of the system are taken, so that it starts where one does.
    pub(super) fn allocate(context: &Arc<CudaContext>, device: DeviceId, label: &str, bytes: u64) -> Result<Self> {
        let bytes = bytes.checked_next_multiple_of(4).unwrap_or(u64::MAX);
        let taken = bytes.max(1).checked_next_multiple_of(FILE_ALIGN).unwrap_or(u64::MAX);
        let memory = Arc::new(Pinned::new(context, label, taken)?);
        Ok(CudaHost { memory, copying: Arc::default(), bytes, device })
    }

    /// The device address of its first byte.
    pub fn address(&self) -> sys::CUdeviceptr {
        self.memory.start().as_ptr() as sys::CUdeviceptr
    }

    /// Where byte `offset` lies; the caller has checked it.
    fn at(&self, offset: u64) -> *mut u8 {
        self.memory.start().as_ptr().wrapping_add(offset as usize)
    }

    /// Copies a checked range out.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) {
        let _reading = self.copying.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range was checked; `out` is the caller's own; no thread writes while the lock is held, and the
        // device, by the contract of `read_host`, has finished writing.
        unsafe { self.at(offset).copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
    }

    /// Copies a checked range in.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        let _writing = self.copying.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range was checked; `data` is the caller's own; no other thread copies while the lock is held, and
        // the device, by the contract of `write_host`, has finished with the range.
        unsafe { self.at(offset).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    }
}

/// Enqueues a validated swap.
pub(super) fn swap(
    kernels: &Kernels,
    stream: &mut CudaStream,
    args: &Swap<'_, CudaMemory, CudaHost>,
    out: bool,
) -> Result<()> {
    if super::count(args.moves.len(), "the number of moves")? == 0 {
        return Ok(());
    }
    let frames = Side::frames(&args.arena)?;
    let records = Side::records(args.host.address() + args.offset, args.stride)?;
    let (runs, scattered) = plan(args.moves, &args.record, args.stride, args.arena.slab_shift, out);
    for run in runs {
        let (slab, index) = split_frame(run.frame, args.arena.slab_shift);
        let frame = args.arena.slabs[slab as usize].at(u64::from(index) * args.stride);
        let host = args.host.address() + args.host_offset(run.host);
        let (from, to) = if out { (frame, host) } else { (host, frame) };
        let bytes = u64::from(run.records) * args.stride;
        // SAFETY: frames and records of the run are side by side and were validated; both memories outlive the work that
        // uses them (see `CudaMemory` and `CudaHost`).
        unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, stream.raw()) }
            .result()
            .map_err(failed("cuMemcpyAsync"))?;
    }
    if scattered.is_empty() {
        return Ok(());
    }
    let sides = if out { [&frames, &records] } else { [&records, &frames] };
    // SAFETY: frames and host records were validated; both memories outlive the kernel (see `CudaMemory`, `CudaHost`).
    unsafe { run(kernels, stream, &args.record, sides, &scattered, BLOCKS) }
}

/// Records side by side, in one slab and on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    /// The first frame.
    frame: u32,
    /// The first host record.
    host: u32,
    records: u32,
}

/// Splits moves into long runs and the rest. There are runs only where no gap lies between records on either side.
fn plan(moves: &[Move], record: &Record, stride: u64, slab_shift: u32, out: bool) -> (Vec<Run>, Vec<Move>) {
    let (mut runs, mut scattered) = (Vec::new(), Vec::new());
    if record.bytes() != stride || record.frame_stride() != stride {
        return (runs, moves.to_vec());
    }
    let next = |a: &Move, b: &Move| {
        let ((a_frame, a_host), (b_frame, b_host)) = (sides(a, out), sides(b, out));
        let slab = |frame| split_frame(frame, slab_shift).0;
        a_frame.checked_add(1) == Some(b_frame)
            && slab(a_frame) == slab(b_frame)
            && a_host.checked_add(1) == Some(b_host)
    };
    for run in by_host(moves, out).chunk_by(next) {
        if run.len() as u64 * stride < LONG_RUN {
            scattered.extend_from_slice(run);
            continue;
        }
        let (frame, host) = sides(&run[0], out);
        runs.push(Run { frame, host, records: run.len() as u32 });
    }
    (runs, scattered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Geometry;

    /// A record of 64 KiB: 64 of them are a long run.
    fn record() -> Record {
        Record::new(Geometry::new(1, 8, 8, 128).validate().unwrap())
    }

    fn moves(pairs: impl IntoIterator<Item = (u32, u32)>, out: bool) -> Vec<Move> {
        pairs
            .into_iter()
            .map(|(frame, host)| if out { (frame, host) } else { (host, frame) })
            .map(|(from, to)| Move { from, to })
            .collect()
    }

    #[test]
    fn long_runs_go_to_the_copy_engine_and_the_rest_to_the_kernel() {
        let (record, stride) = (record(), 65_536);
        assert_eq!(record.bytes(), stride);
        for out in [true, false] {
            let split = |pairs: Vec<(u32, u32)>| plan(&moves(pairs, out), &record, stride, 8, out);
            let run = |frame, host, records| Run { frame, host, records };
            // In any order, with a page in between that belongs elsewhere.
            let pairs: Vec<_> = (0..70).rev().map(|i| (40 + i, 100 + i)).chain([(7, 170)]).collect();
            assert_eq!(split(pairs), (vec![run(40, 100, 70)], moves([(7, 170)], out)));
            // One record short of a run.
            let short: Vec<_> = (0..63).map(|i| (i, i)).collect();
            assert_eq!(split(short.clone()), (vec![], moves(short, out)));
            // Frames 255 and 256 are of two slabs.
            let across: Vec<_> = (186..326).map(|i| (i, i)).collect();
            assert_eq!(split(across), (vec![run(186, 186, 70), run(256, 256, 70)], vec![]));
            // Host records with a hole, frames in descending order.
            let hole: Vec<_> = (0..120).map(|i| (i, i + i / 60)).collect();
            assert_eq!(split(hole.clone()), (vec![], moves(hole, out)));
            let descending: Vec<_> = (0..120).map(|i| (120 - i, i)).collect();
            assert_eq!(split(descending.clone()), (vec![], moves(descending, out)));
            assert_eq!(split(vec![]), (vec![], vec![]));
        }
    }

    #[test]
    fn records_with_gaps_are_no_runs() {
        let pairs: Vec<_> = (0..64).map(|i| (i, i)).collect();
        let all = moves(pairs, true);
        assert_eq!(plan(&all, &record(), 65_536 + 256, 8, true), (vec![], all.clone()));
        let odd = Record::new(Geometry::new(1, 3, 3, 24).value_dim(16).page_size(8).validate().unwrap());
        assert_ne!(odd.bytes(), odd.frame_stride());
        assert_eq!(plan(&all, &odd, odd.frame_stride(), 8, true), (vec![], all));
    }
}
