//! What happens when the tier, or the device, holds no more?

use super::super::check::{Check, Verdict};
use super::twin::{See, Twin, is_full};
use super::{Setup, over_tiers};
use crate::swap::{WhenFull, WriteOut};
use crate::{Backend, Error, PageFormat};

/// B45's kind: appends until nothing fits. The refusal has numbers and changes nothing; room made by a drop is used.
pub(super) fn full_tier<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for when_full in [WhenFull::Hold, WhenFull::Refuse] {
            for write_out in [WriteOut::Pressure, WriteOut::Eager] {
                let change = |c: &mut crate::swap::SwapConfig| (c.when_full, c.write_out) = (when_full, write_out);
                let mut twin = Twin::new(backend, &Setup::new(kind, format, 64, 12).slots(20).config(change))?;
                let (first, second) = (twin.begin(), twin.begin());
                twin.write(0, &[(first, None, 64 * 10)], 1)?;
                let mut pages = 10;
                let refusal = loop {
                    match twin.try_write(0, &[(second, None, 64)], pages)? {
                        Ok(()) => pages += 1,
                        Err(error) => break error,
                    }
                };
                let full = match &refusal {
                    Error::TierFull { required, free, capacity: 20, .. } => required > free,
                    _ => false,
                };
                check.holds(&format!("{when_full:?} says that the tier is full: {refusal}"), full);
                // Frames for one split stay free for what must come back.
                let most = if when_full == WhenFull::Hold { 28..=28 } else { 20..=20 };
                check.holds(&format!("{pages} pages fit"), most.contains(&pages));
                check.holds("no length has changed", twin.swap.len(&twin.seqs[second].swap, 0)? == (pages - 10) * 64);
                twin.compare_all(2, &mut check)?;
                // Full pages that are written anew need no more room than they have.
                twin.write(0, &[(first, Some(64), 128)], 5)?;
                twin.compare_all(6, &mut check)?;
                twin.seqs.remove(first);
                twin.write(0, &[(0, None, 64)], 3)?;
                twin.compare_all(4, &mut check)?;
                twin.finish(&mut check)?;
            }
        }
        check.done()
    })
}

/// Partial tails cannot leave: when there are too many of them the next one is refused, and the others are right.
pub(super) fn too_many_tails<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let mut twin = Twin::new(backend, &Setup::new(kind, format, 64, 9))?;
        let long = twin.begin();
        twin.write(0, &[(long, None, 64 * 8)], 1)?;
        let refusal = loop {
            let seq = twin.begin();
            if let Err(error) = twin.try_write(0, &[(seq, None, 5)], 2)? {
                break error;
            }
        };
        let counted = matches!(refusal, Error::NothingEvictable { required: 1.., frames: 9, pinned: 0, .. });
        check.holds(&format!("the refusal counts frames: {refusal}"), counted);
        check.holds("as many tails as leave room for a split", (6..=10).contains(&twin.seqs.len()));
        twin.compare_all(3, &mut check)?;
        let tails: Vec<_> = (1..twin.seqs.len()).map(|seq| (seq, See::Tail(1))).collect();
        twin.attend(0, &tails, 4, &mut check)?;
        // A batch whose tails do not fit together is refused as a whole.
        let step: Vec<_> = (0..12).map(|_| twin.begin()).map(|seq| (seq, None, 3)).collect();
        let refused = twin.try_write(0, &step, 5)?;
        check.refused("a batch of tails", refused, is_full);
        check.holds(
            "none of it is there",
            step.iter().all(|&(seq, ..)| twin.swap.is_empty(&twin.seqs[seq].swap) == Ok(true)),
        );
        twin.seqs.truncate(2);
        let seq = twin.begin();
        twin.write(0, &[(seq, None, 5)], 6)?;
        twin.compare_all(7, &mut check)?;
        twin.finish(&mut check)?;
        check.done()
    })
}
