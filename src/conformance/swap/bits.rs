//! C1: is attention over pages that come and go the same to the last bit, whatever the budget and the settings?

use super::super::check::{Check, Verdict};
use super::super::values::Rng;
use super::twin::{See, Twin};
use super::{Setup, TierKind, over_tiers, split_pages};
use crate::swap::{PolicyChoice, SwapConfig, WriteOut};
use crate::{Backend, PageFormat};

/// One split's pages and a page more: what the builder allows at least.
pub(super) fn smallest_budget<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for (page_size, tokens) in [(8, 700), (16, 1025), (64, 1300), (256, 1100)] {
            for write_out in [WriteOut::Pressure, WriteOut::Eager] {
                let setup = Setup::new(kind, format, page_size, split_pages(page_size) + 1);
                let mut twin = Twin::new(backend, &setup.config(|c| c.write_out = write_out))?;
                let seq = twin.begin();
                twin.write(0, &[(seq, None, tokens)], 1)?;
                for see in [See::Tail(1), See::Tail(40), See::At(5, 3), See::Window(2, 300), See::Full(2)] {
                    twin.attend(0, &[(seq, see)], 2, &mut check)?;
                }
                twin.context(0, seq, &mut check)?;
                check.holds("pages have left", twin.swap.stats().streamed_pages > 0);
                twin.finish(&mut check)?;
            }
        }
        check.done()
    })
}

/// Ragged sequences in two layers under many settings, before and after forks and truncations of what has left.
pub(super) fn any_configuration<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for setup in settings(kind, format) {
            let mut twin = Twin::new(backend, &setup)?;
            let pages = grow(&mut twin)?;
            look(&mut twin, 20, &mut check)?;
            branch(&mut twin, &mut check)?;
            look(&mut twin, 40, &mut check)?;
            twin.compare_all(60, &mut check)?;
            let stats = twin.swap.stats();
            let what = format!("pages leave {} frames for {pages} pages: {:?}", setup.frames, stats.attend);
            check.holds(&what, stats.streamed_pages > pages || setup.frames >= pages);
            twin.finish(&mut check)?;
        }
        check.done()
    })
}

/// Settings from the least frames to all, each other field going through its values.
fn settings(kind: TierKind, format: PageFormat) -> Vec<Setup> {
    let mut list = Vec::new();
    for (at, page_size) in [8u32, 16, 64, 256].into_iter().enumerate() {
        let split = split_pages(page_size);
        // Pages of two layers and eight sequences at most, and the partial ones among them.
        let (all, tails) = (2 * (9 * split + 8), 16);
        for (share, frames) in [split + tails + 2, all / 4 + tails, all / 2 + tails, 2 * all].into_iter().enumerate() {
            let turn = at + share;
            let tile_pages = [1, split as u32, 10_000][turn % 3];
            let config = SwapConfig {
                tile_pages,
                tiles_ahead: [None, Some(0), Some(1), Some(5)][(turn + at) % 4],
                layer_ahead: turn.is_multiple_of(2),
                policy: [PolicyChoice::StableSubset, PolicyChoice::Lru, PolicyChoice::PredictedScore]
                    [(turn + share) % 3],
                write_out: [WriteOut::Pressure, WriteOut::Eager][share % 2],
                ..SwapConfig::default()
            };
            let setup = Setup::new(kind, format, page_size, frames).layers(2);
            list.push(setup.config(|c| *c = config));
        }
    }
    list
}

/// Five sequences, one of them empty, grown in turns. Returns the pages that they hold.
fn grow<B: Backend>(twin: &mut Twin<'_, B>) -> Result<u64, super::Failure> {
    let lens = [0u32, 3, 300, 513, 1100];
    for _ in lens {
        twin.begin();
    }
    let mut rng = Rng::new(3);
    for layer in 0..2 {
        let mut at = [0; 5];
        while at != lens {
            let piece = |rng: &mut Rng, seq: usize| (lens[seq] - at[seq]).min(1 + rng.below(250));
            let writes: Vec<_> = (0..5).map(|seq| (seq, None, piece(&mut rng, seq))).collect();
            twin.write(layer, &writes, rng.bits())?;
            writes.iter().for_each(|&(seq, _, tokens)| at[seq] += tokens);
        }
    }
    Ok(twin.swap.stats().store.held_pages)
}

/// Batches of every kind of rows, in both layers, as a model would ask for them.
fn look<B: Backend>(twin: &mut Twin<'_, B>, seed: u64, check: &mut Check) -> Result<(), super::Failure> {
    for layer in 0..2 {
        let decode = [4, 0, 2, 1, 3].map(|seq| (seq, See::Tail(1)));
        twin.attend(layer, &decode, seed, check)?;
        let mixed = [(3, See::At(100, 20)), (1, See::Full(2)), (4, See::Window(3, 400)), (2, See::Tail(9))];
        twin.attend(layer, &mixed, seed + 1, check)?;
        let again = [(4, See::Window(1, 10)), (3, See::Tail(1)), (4, See::At(0, 2)), (4, See::Full(1))];
        twin.attend(layer, &again, seed + 2, check)?;
    }
    Ok(())
}

/// Forks and truncations of sequences whose pages have left, each of them then goes on.
fn branch<B: Backend>(twin: &mut Twin<'_, B>, check: &mut Check) -> Result<(), super::Failure> {
    twin.send_away(3)?;
    twin.send_away(4)?;
    let (fork, short) = (twin.fork(3)?, twin.fork_at(4, 500)?);
    twin.truncate(3, 333)?;
    for layer in 0..2 {
        twin.attend(layer, &[(fork, See::Tail(2)), (short, See::Tail(1)), (3, See::Tail(1))], 30, check)?;
        twin.write(layer, &[(fork, None, 40), (short, None, 13), (3, None, 1)], 31)?;
        twin.write(layer, &[(4, Some(255), 3)], 32)?;
        twin.attend(layer, &[(fork, See::Tail(2)), (short, See::Tail(1)), (3, See::Tail(1))], 33, check)?;
    }
    Ok(())
}

/// States for one row at a time and for a few: the same pages come several times in one call.
pub(super) fn many_batches<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for (state_bytes, tiles_ahead) in [(1, None), (1000, Some(0)), (3000, Some(5))] {
            let setup =
                Setup::new(kind, format, 64, 9).config(|c| (c.state_bytes, c.tiles_ahead) = (state_bytes, tiles_ahead));
            let mut twin = Twin::new(backend, &setup)?;
            let seqs = [twin.begin(), twin.begin()];
            twin.write(0, &[(seqs[0], None, 900), (seqs[1], None, 400)], 1)?;
            for see in [See::Tail(5), See::Full(3), See::Window(4, 260)] {
                twin.attend(0, &[(seqs[0], see), (seqs[1], see), (seqs[0], See::Tail(1))], 2, &mut check)?;
            }
            check.holds("pages have left", twin.swap.stats().streamed_pages > 20);
            twin.finish(&mut check)?;
        }
        check.done()
    })
}

/// Every split has some pages on the device and some elsewhere, on the smallest device that works: what one tile holds on
/// to must not keep another from its frames.
pub(super) fn half_resident_splits<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for tiles_ahead in [0, 1, 5] {
            for (page_size, frames) in [(16, 17), (16, 24), (64, 5), (64, 7), (8, 40)] {
                let setup = Setup::new(kind, format, page_size, frames).config(|c| c.tiles_ahead = Some(tiles_ahead));
                let mut twin = Twin::new(backend, &setup)?;
                let seq = twin.begin();
                twin.write(0, &[(seq, None, 256 * 9)], 1)?;
                twin.send_away(seq)?;
                let split = split_pages(page_size);
                for first in 0..split {
                    // One page of every split, as far as the device goes.
                    for page in (0..9).map(|at| at * split + first).take(frames as usize - 1) {
                        twin.swap.prefetch(0, &twin.seqs[seq].swap, page..page + 1)?;
                    }
                    twin.attend(0, &[(seq, See::Tail(2))], 2 + first, &mut check)?;
                    twin.swap.evict(&twin.seqs[seq].swap)?;
                }
                twin.finish(&mut check)?;
            }
        }
        check.done()
    })
}

/// A write of no tokens changes nothing: neither where a page is nor what it holds.
pub(super) fn empty_writes<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let mut twin = Twin::new(backend, &Setup::new(kind, format, 16, 17))?;
        let seqs = [twin.begin(), twin.begin()];
        twin.write(0, &[(seqs[0], None, 320)], 1)?;
        twin.send_away(seqs[0])?;
        twin.truncate(seqs[0], 311)?;
        let before = twin.swap.pages(0, &twin.seqs[seqs[0]].swap)?;
        twin.write(0, &[(seqs[0], None, 0)], 2)?;
        twin.write(0, &[(seqs[0], Some(100), 0), (seqs[1], None, 5)], 3)?;
        check.holds("no page has moved", before == twin.swap.pages(0, &twin.seqs[seqs[0]].swap)?);
        twin.compare_all(4, &mut check)?;
        twin.finish(&mut check)?;
        check.done()
    })
}
