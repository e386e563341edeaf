//! A page that does not travel: is it named, is nothing mapped or leaked, and is the next answer right? (B41, B43, B45)

use super::super::check::{Check, Verdict};
use super::faulty::Fault;
use super::twin::{See, Twin};
use super::{Setup, bottom, over_tiers};
use crate::swap::WriteOut;
use crate::{Backend, Error, PageFormat};

/// Reads that fail once, always, by slot, by number, as a batch, or in silence.
pub(super) fn reads<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for tiles_ahead in [Some(0), Some(2)] {
            let setup =
                Setup::new(kind, format, 64, 9).layers(2).config(|c| (c.tiles_ahead, c.tile_pages) = (tiles_ahead, 4));
            let mut twin = Twin::new(backend, &setup)?;
            let seqs = [twin.begin(), twin.begin()];
            (0..2).try_for_each(|layer| twin.write(layer, &[(seqs[0], None, 64 * 12), (seqs[1], None, 512)], 1))?;
            for always in [false, true] {
                for place in 0..9 {
                    seqs.iter().try_for_each(|&seq| twin.send_away(seq).map(drop))?;
                    let pages = twin.swap.pages(1, &twin.seqs[seqs[0]].swap)?;
                    let slot = pages[3].slot.unwrap_or(u32::MAX);
                    let fault = [Fault::Slot(slot), Fault::Nth(place), Fault::Batch, Fault::Short][place as usize % 4];
                    (twin.faults.plan().read, twin.faults.plan().always) = (Some(fault), always);
                    twin.faults.plan().happened = 0;
                    let slots = bottom(&twin.swap.stats()).used_pages;
                    let looks = [(seqs[0], See::Tail(2)), (seqs[1], See::Tail(1))];
                    let answer = twin.try_attend(1, &looks, place, &mut check)?;
                    check.holds("the fault has happened", twin.faults.plan().happened > 0);
                    let numbers: Vec<u64> = twin.seqs.iter().map(|pair| pair.swap.id()).collect();
                    let named = match &answer {
                        // A second try may have brought it.
                        Ok(()) => !always,
                        Err(Error::Page { sequence, layer: 1, page, .. }) => match fault {
                            Fault::Slot(_) => *sequence == numbers[0] && *page == 3,
                            _ => numbers.contains(sequence) && *page < 12,
                        },
                        Err(Error::Device { .. }) => fault == Fault::Batch,
                        Err(_) => false,
                    };
                    check.holds(&format!("{fault:?}, always {always}: {answer:?}"), named);
                    if always && matches!(fault, Fault::Slot(_)) {
                        let page = twin.swap.pages(1, &twin.seqs[seqs[0]].swap)?[3];
                        check.holds("nothing is mapped for it", !page.resident && page.slot == Some(slot));
                    }
                    twin.faults.plan().read = None;
                    let stats = twin.swap.stats();
                    check.holds(
                        "no pin and no slot is lost",
                        (stats.pinned_pages, bottom(&stats).used_pages) == (0, slots),
                    );
                    check.holds("the books agree", twin.swap.is_consistent());
                    twin.attend(1, &looks, 50 + place, &mut check)?;
                }
            }
            twin.compare_all(99, &mut check)?;
            twin.finish(&mut check)?;
        }
        check.done()
    })
}

/// Writes that fail: the page stays on the device and right, and goes out later.
pub(super) fn writes<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for write_out in [WriteOut::Pressure, WriteOut::Eager] {
            for fault in [Fault::Slot(2), Fault::Nth(0), Fault::Nth(3), Fault::Batch, Fault::Short] {
                let setup = Setup::new(kind, format, 64, 12).config(|c| (c.write_out, c.tile_pages) = (write_out, 2));
                let mut twin = Twin::new(backend, &setup)?;
                let seq = twin.begin();
                twin.write(0, &[(seq, None, 64 * 6)], 1)?;
                // Once, by itself: whoever meets it may say so, and everything goes on.
                twin.faults.plan().write = Some(fault);
                let mut said = 0;
                for step in 0..8u64 {
                    for _ in 0..3 {
                        match twin.try_write(0, &[(seq, None, 64 + step as u32)], step)? {
                            Ok(()) => break,
                            Err(Error::Page { .. } | Error::Device { .. }) => said += 1,
                            Err(error) => check.holds(&format!("{fault:?}: {error}"), false),
                        }
                    }
                }
                check.holds("one fault is said once", said <= 1 && twin.faults.plan().happened == 1);
                let _ = twin.swap.synchronize();
                twin.compare_all(2, &mut check)?;
                // For good, on demand.
                twin.write(0, &[(seq, None, 64 * 2)], 3)?;
                (twin.faults.plan().write, twin.faults.plan().always) = (Some(fault), true);
                let slots = |twin: &mut Twin<'_, B>| {
                    let _ = twin.swap.synchronize();
                    let own = twin.swap.pages(0, &twin.seqs[seq].swap).unwrap_or_default();
                    own.iter().filter(|page| page.slot.is_some()).count() as u64
                        == bottom(&twin.swap.stats()).used_pages
                };
                if fault != Fault::Slot(2) && !matches!(fault, Fault::Nth(_)) {
                    let answer = twin.swap.offload(&twin.seqs[seq].swap);
                    check
                        .refused("offload", answer, |error| matches!(error, Error::Page { .. } | Error::Device { .. }));
                }
                let one = twin.swap.pages(0, &twin.seqs[seq].swap)?;
                check
                    .holds("what was not written is on the device", one.iter().all(|p| p.resident || p.slot.is_some()));
                check.holds("no slot is lost", slots(&mut twin));
                twin.faults.plan().write = None;
                twin.send_away(seq)?;
                check.holds("no slot is lost afterwards", slots(&mut twin) && twin.swap.is_consistent());
                twin.compare_all(4, &mut check)?;
                twin.finish(&mut check)?;
            }
        }
        check.done()
    })
}

/// Writes that are acknowledged late: nothing is given up, overwritten or freed before.
pub(super) fn late<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for delay in [1, 4, 1000] {
            let setup = Setup::new(kind, format, 64, 10).config(|c| c.write_out = WriteOut::Eager);
            let mut twin = Twin::new(backend, &setup)?;
            twin.faults.plan().delay = delay;
            let seq = twin.begin();
            for step in 0..12u64 {
                twin.write(0, &[(seq, None, 150)], step)?;
                // Into pages that are on their way, as owner and as fork.
                let len = twin.len(0, seq);
                twin.write(0, &[(seq, Some(len - 140), 70)], 100 + step)?;
                let fork = twin.fork_at(seq, len - 20)?;
                twin.write(0, &[(fork, Some(len - 90), 80)], 200 + step)?;
                twin.attend(0, &[(fork, See::Tail(1)), (seq, See::Tail(3))], 300 + step, &mut check)?;
                twin.seqs.truncate(1);
                twin.truncate(seq, len - 10)?;
                check.holds("the books agree", twin.swap.is_consistent());
            }
            twin.swap.synchronize()?;
            twin.send_away(seq)?;
            twin.compare_all(4, &mut check)?;
            twin.finish(&mut check)?;
        }
        check.done()
    })
}
