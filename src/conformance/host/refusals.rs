//! Are swaps and host memory that cannot be refused, with nothing changed?

use super::super::bench::Bench;
use super::super::check::{Check, Failure, Verdict};
use super::super::transfer::random_arena;
use super::{KINDS, Records, tiny};
use crate::Error;
use crate::backend::params::Move;
use crate::backend::{Backend, HostMemory, HostUse, Swap};

pub(super) fn refusals<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let mut pages = random_arena(&mut bench, tiny(), 6, 2)?;
    let [frame, other] = pages.take(2)[..] else { return Err(Failure("two frames were asked for".into())) };
    let records = Records::new(&bench, HostUse::Shared, 4, 0, 512)?;
    let stream = &mut bench.stream;
    let outside: fn(&Error) -> bool = |e| matches!(e, Error::OutOfBounds { .. });
    let misaligned: fn(&Error) -> bool = |e| matches!(e, Error::Misaligned { .. });
    let shape: fn(&Error) -> bool = |e| matches!(e, Error::Shape { .. });
    // Offset, stride, frame and host record.
    let bad = [
        (0, 512, frame, 4, outside),
        (256, 512, frame, 3, outside),
        (0, 768, frame, 3, outside),
        (0, 512, frame, u32::MAX, outside),
        (u64::MAX - 255, 512, frame, 0, outside),
        (0, u64::MAX - 255, frame, 2, outside),
        (0, 512, 3, 0, outside),
        (0, 512, 2 << pages.shift, 0, outside),
        (0, 512, u32::MAX, 0, outside),
        (128, 512, frame, 0, misaligned),
        (4, 512, frame, 0, misaligned),
        (0, 640, frame, 0, misaligned),
        (0, 256, frame, 0, shape),
        (0, 0, frame, 0, shape),
    ];
    for (offset, stride, frame_number, index, kind) in bad {
        // A good move in front must not happen either.
        let name = format!("frame {frame_number}, host record {index} at {offset}, {stride} bytes apart");
        let out = [(frame, 1), (frame_number, index)].map(|(from, to)| Move { from, to });
        let back = [(0, other), (index, frame_number)].map(|(from, to)| Move { from, to });
        let args = |moves| Swap { offset, stride, ..records.args(&pages, moves) };
        check.refused(&format!("out: {name}"), backend.swap_out(stream, &args(&out)), kind);
        check.refused(&format!("in: {name}"), backend.swap_in(stream, &args(&back)), kind);
    }
    let end = records.host.bytes();
    for (at, bytes, kind) in [(end, 4, outside), (end - 4, 8, outside), (u64::MAX - 3, 8, outside)]
        .into_iter()
        .chain([(2, 4, misaligned), (4, 6, misaligned)])
    {
        let mut data = vec![0; bytes];
        check.refused("reading host memory", backend.read_host(&records.host, at, &mut data), kind);
        check.refused("writing host memory", backend.write_host(&records.host, at, &data), kind);
    }
    backend.read_host(&records.host, end, &mut [])?;
    backend.write_host(&records.host, end, &[])?;
    pages.compare(&mut bench, &mut check, 0)?;
    records.compare(&mut bench, &mut check)?;
    check.done()
}

pub(super) fn too_large<B: Backend>(backend: &B) -> Verdict {
    let mut check = Check::default();
    for usage in KINDS {
        for bytes in [1 << 60, u64::MAX - 3, u64::MAX] {
            let typed = |e: &Error| matches!(e, Error::OutOfMemory { .. } | Error::Limit { .. });
            check.refused("impossible host memory", backend.alloc_host("too large", bytes, usage), typed);
        }
        let empty = backend.alloc_host("nothing", 0, usage)?;
        check.holds("host memory of no bytes", HostMemory::bytes(&empty) == 0);
    }
    check.done()
}

/// Whether a device refuses the host memory, the frames and the events of another.
pub(in super::super) fn foreign_host_memory<B: Backend>(here: &B, there: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(here)?, Check::default());
    let mut away = Bench::new(there)?;
    let pages = random_arena(&mut bench, tiny(), 4, 1)?;
    let theirs = random_arena(&mut away, tiny(), 4, 1)?;
    let [near, far] = [&bench, &away].map(|bench| Records::dense(bench, HostUse::Shared, 4, &pages.record));
    let (near, far) = (near?, far?);
    let wrong = |e: &Error| matches!(e, Error::WrongDevice { .. });
    let moves = [Move { from: 0, to: 1 }];
    for (what, args) in [("host memory", far.args(&pages, &moves)), ("frames", near.args(&theirs, &moves))] {
        check.refused(&format!("{what} out"), here.swap_out(&mut bench.stream, &args), wrong);
        check.refused(&format!("{what} in"), here.swap_in(&mut bench.stream, &args), wrong);
    }
    check.refused("reading", here.read_host(&far.host, 0, &mut [0; 4]), wrong);
    check.refused("writing", here.write_host(&far.host, 0, &[0; 4]), wrong);
    near.compare(&mut bench, &mut check)?;
    far.compare(&mut away, &mut check)?;
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}
