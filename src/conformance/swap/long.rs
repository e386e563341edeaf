//! Does more than the device holds go through it, each full page once?

use super::super::check::{Check, Verdict};
use super::twin::{See, Twin};
use super::{Setup, over_tiers, written};
use crate::swap::WriteOut;
use crate::{Backend, PageFormat};

/// One append of ten times the device, then prefill in chunks that attend as they go.
pub(super) fn prefill<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for write_out in [WriteOut::Pressure, WriteOut::Eager] {
            let setup = Setup::new(kind, format, 64, 6).config(|c| c.write_out = write_out);
            let mut twin = Twin::new(backend, &setup)?;
            let (whole, chunked) = (twin.begin(), twin.begin());
            twin.write(0, &[(whole, None, 60 * 64 + 5)], 1)?;
            twin.attend(0, &[(whole, See::Tail(3))], 2, &mut check)?;
            for chunk in 0..7u32 {
                twin.write(0, &[(chunked, None, 150 + chunk)], 3 + u64::from(chunk))?;
                twin.attend(0, &[(chunked, See::Tail(150 + chunk))], 20, &mut check)?;
            }
            twin.compare_all(30, &mut check)?;
            let stats = twin.swap.stats();
            check.holds(
                "the device holds no more than its budget",
                twin.swap.arena_bytes() <= 6 * twin.swap.record().frame_stride(),
            );
            check.holds("pages have left", stats.streamed_pages > 60 && stats.resident_pages <= 6);
            twin.finish(&mut check)?;
        }
        check.done()
    })
}

/// `write_at` over one page and over more pages than the device holds, in own pages and in shared ones (B31, B32).
pub(super) fn write_into_swapped<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let mut twin = Twin::new(backend, &Setup::new(kind, format, 64, 8))?;
        let seq = twin.begin();
        twin.write(0, &[(seq, None, 40 * 64 + 9)], 1)?;
        twin.send_away(seq)?;
        twin.write(0, &[(seq, Some(100), 1)], 2)?;
        twin.write(0, &[(seq, Some(640), 64)], 3)?;
        twin.write(0, &[(seq, Some(70), 30 * 64)], 4)?;
        twin.compare_all(5, &mut check)?;
        let copied = twin.swap.stats().store.copied_pages;
        let forks = [twin.fork(seq)?, twin.fork(seq)?];
        twin.send_away(seq)?;
        twin.write(0, &[(forks[0], Some(5), 1), (forks[1], Some(6), 2)], 6)?;
        twin.write(0, &[(forks[1], Some(1000), 20 * 64)], 7)?;
        twin.write(0, &[(seq, None, 200)], 8)?;
        twin.compare_all(9, &mut check)?;
        check.holds("shared pages were copied", twin.swap.stats().store.copied_pages >= copied + 2);
        twin.seqs.remove(1);
        twin.compare_all(10, &mut check)?;
        twin.finish(&mut check)?;
        check.done()
    })
}

/// A long decode: as many pages go to the tier as become full, the tail never does, and the answers are right.
pub(super) fn written_once<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for write_out in [WriteOut::Pressure, WriteOut::Eager] {
            let setup = Setup::new(kind, format, 16, 20).layers(2).config(|c| c.write_out = write_out);
            let mut twin = Twin::new(backend, &setup)?;
            let seq = twin.begin();
            (0..2).try_for_each(|layer| twin.write(layer, &[(seq, None, 250)], layer as u64))?;
            for step in 0..150u64 {
                for layer in 0..2 {
                    twin.write(layer, &[(seq, None, 1)], 10 + step)?;
                    if step % 5 == 0 {
                        twin.attend(layer, &[(seq, See::Tail(1))], 11 + step, &mut check)?;
                    }
                }
            }
            // A cascade may pass a page on from one level to the next.
            let levels = twin.swap.stats().tiers.len() as u64;
            let before = written(&twin.swap.stats());
            check.holds("some pages went out by themselves", before > 0 && before <= 50 * levels);
            twin.swap.offload(&twin.seqs[seq].swap)?;
            twin.swap.offload(&twin.seqs[seq].swap)?;
            twin.compare_all(9, &mut check)?;
            let count = written(&twin.swap.stats());
            check.holds(&format!("{count} pages were written, not 2 × 25"), (50..=50 * levels).contains(&count));
            let tails = (0..2).map(|layer| twin.swap.pages(layer, &twin.seqs[seq].swap));
            let tails = tails.map(|pages| pages.map(|pages| pages[24].slot.is_some()));
            check.holds("full last pages are in the tier", tails.collect::<Result<Vec<_>, _>>()? == [true; 2]);
            (0..2).try_for_each(|layer| twin.write(layer, &[(seq, None, 1)], 20))?;
            twin.swap.offload(&twin.seqs[seq].swap)?;
            let tail = twin.swap.pages(0, &twin.seqs[seq].swap)?[25];
            check.holds("the partial tail stays", tail.resident && tail.slot.is_none());
            check.holds("and is not written", written(&twin.swap.stats()) <= 50 * levels);
            twin.finish(&mut check)?;
        }
        check.done()
    })
}

/// Sequences come and go on a device that holds them all: nothing travels, and nothing that is gone is remembered.
pub(super) fn long_life<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let mut twin = Twin::new(backend, &Setup::new(kind, format, 64, 20))?;
        let old = twin.begin();
        twin.write(0, &[(old, None, 130)], 1)?;
        for round in 0..150 {
            let seq = twin.begin();
            twin.write(0, &[(seq, None, 64)], round)?;
            twin.write(0, &[(old, Some(0), 64)], round)?;
            twin.seqs.truncate(1);
        }
        twin.compare_all(2, &mut check)?;
        check.holds("nothing has travelled", written(&twin.swap.stats()) == 0);
        twin.finish(&mut check)?;
        check.done()
    })
}
