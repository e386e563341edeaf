//! Do pins hold, and does no call leave one behind?

use super::super::check::{Check, Verdict};
use super::faulty::Fault;
use super::twin::{See, Twin};
use super::{Setup, over_tiers};
use crate::{Backend, Error, PageFormat};

/// B49: with every frame pinned, whatever needs one is refused at once and changes nothing; once unpinned it works.
pub(super) fn all_pinned<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let mut twin = Twin::new(backend, &Setup::new(kind, format, 16, 17))?;
        let (held, other) = (twin.begin(), twin.begin());
        twin.write(0, &[(held, None, 272)], 1)?;
        twin.write(0, &[(other, None, 256)], 2)?;
        twin.send_away(held)?;
        twin.send_away(other)?;
        twin.swap.pin(0, &twin.seqs[held].swap, 0..u64::MAX)?;
        twin.swap.pin(0, &twin.seqs[held].swap, 3..5)?;
        check.holds("17 pages are pinned", twin.swap.stats().pinned_pages == 17);
        check.holds("pinned pages stay", twin.swap.evict(&twin.seqs[held].swap)? == 0);
        let none =
            |error: &Error| matches!(error, Error::NothingEvictable { evictable: 0, frames: 17, pinned: 17.., .. });
        for _ in 0..50 {
            let attend = twin.try_attend(0, &[(other, See::Tail(1))], 3, &mut check)?;
            check.refused("attend", attend, none);
            let write = twin.try_write(0, &[(other, None, 1)], 4)?;
            check.refused("append", write, none);
            let overwrite = twin.try_write(0, &[(other, Some(17), 3)], 4)?;
            check.refused("write into a page that left", overwrite, none);
            let context = twin.try_context(0, other, &mut check)?;
            check.refused("context", context, none);
            check.refused("pin", twin.swap.pin(0, &twin.seqs[other].swap, 0..1), none);
            check.refused("prefetch", twin.swap.prefetch(0, &twin.seqs[other].swap, 0..1), none);
            check.refused("reserve", twin.swap.reserve(&twin.seqs[other].swap, 272), none);
            check.holds("17 pages are still pinned", twin.swap.stats().pinned_pages == 17);
        }
        twin.attend(0, &[(held, See::Tail(2))], 5, &mut check)?;
        twin.swap.unpin(0, &twin.seqs[held].swap, 0..17)?;
        check.holds("pins count", twin.swap.stats().pinned_pages == 2);
        twin.swap.unpin(0, &twin.seqs[held].swap, 3..5)?;
        twin.swap.unpin(0, &twin.seqs[held].swap, 0..17)?;
        twin.compare_all(6, &mut check)?;
        twin.write(0, &[(other, None, 1)], 7)?;
        twin.compare_all(8, &mut check)?;
        twin.finish(&mut check)?;
        check.done()
    })
}

/// 1,000 calls that fail half way leave no pin and no frame behind.
pub(super) fn given_back<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let setup = Setup::new(kind, format, 64, 7);
        let mut twin = Twin::new(backend, &setup)?;
        let (mut stranger, _) = setup.build(backend)?;
        let foreign = stranger.begin();
        let seq = twin.begin();
        twin.write(0, &[(seq, None, 64 * 30)], 1)?;
        twin.send_away(seq)?;
        let page = |error: &Error| matches!(error, Error::Page { .. });
        for round in 0..250 {
            let failing = 3 + round % 4;
            twin.swap.evict(&twin.seqs[seq].swap)?;
            let slot = twin.swap.pages(0, &twin.seqs[seq].swap)?[failing as usize].slot;
            (twin.faults.plan().read, twin.faults.plan().always) = (slot.map(Fault::Slot), true);
            let first = twin.swap.pin(0, &twin.seqs[seq].swap, 3..7);
            check.refused("pin", first, page);
            let attend = twin.try_attend(0, &[(seq, See::Tail(1))], round, &mut check)?;
            check.refused("attend", attend, page);
            let write = twin.try_write(0, &[(seq, Some(64 * failing + 6), 64)], 4)?;
            check.refused("write", write, page);
            twin.faults.plan().read = None;
            let other = twin.swap.attention_context(0, &[&twin.seqs[seq].swap, &foreign]);
            check.refused("a foreign sequence", other, |_| true);
            let stats = twin.swap.stats();
            check.holds("no pin is left", stats.pinned_pages == 0);
            check.holds("the books agree", twin.swap.is_consistent());
        }
        twin.compare_all(5, &mut check)?;
        twin.finish(&mut check)?;
        check.done()
    })
}
