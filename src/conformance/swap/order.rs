//! Does each page come back as itself, in order with the work around it, whatever is dropped meanwhile?

use super::super::check::{Check, Failure, Verdict};
use super::super::store::{context_bits, view};
use super::super::values::Tensor;
use super::constant;
use super::twin::{See, Twin, append};
use super::{Setup, over_tiers};
use crate::store::{Query, Rows};
use crate::swap::{HighSpeedSwap, WriteOut};
use crate::{Backend, Dtype, PageFormat, Sequence, View};

/// K and V of `tokens` tokens, all elements alike.
fn uniform(tokens: u32, k: f32, v: f32) -> [Tensor; 2] {
    [k, v].map(|x| Tensor::of(Dtype::F32, [tokens, 1, 16], move |_, _, _| x))
}

/// A8: three pages with K = i and V = 100 + i; the one in the middle comes back as itself.
pub(super) fn one_of_three<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let (mut swap, _) = Setup::new(kind, format, 16, 17).build(backend)?;
        let seq = swap.begin();
        let by_page = |base: f32| Tensor::of(Dtype::F32, [48, 1, 16], move |t, _, _| base + (t / 16) as f32);
        append(backend, &mut swap, 0, &[(&seq, None, 48)], &[by_page(0.0), by_page(100.0)])??;
        swap.offload(&seq)?;
        check.holds("three pages gave up their frames", swap.evict(&seq)? == 3);
        swap.pin(0, &seq, 1..2)?;
        let here: Vec<bool> = swap.pages(0, &seq)?.iter().map(|page| page.resident).collect();
        check.holds("only the page asked for has come", here == [false, true, false]);
        let middle = swap.fork_at(&seq, 32)?;
        let (k, v) = context_bits(&mut swap, 0, &middle)?;
        check.bits("keys of page 1", &k[256..], &[constant(1.0, format); 256]);
        check.bits("values of page 1", &v[256..], &[constant(101.0, format); 256]);
        swap.unpin(0, &seq, 1..2)?;
        check.done()
    })
}

/// A number for small `n` that the format holds exactly, and of which means are exact: of int8 rows the scale is `n`.
fn marker(n: u32, format: PageFormat) -> f32 {
    (if format.is_quantized() { 127 * n } else { n }) as f32
}

/// Enqueues a decode step of each round's sequence into its own place, and reads nothing before the end.
fn rounds<B: Backend>(
    backend: &B,
    swap: &mut HighSpeedSwap<B>,
    count: u32,
    mut step: impl FnMut(
        &mut HighSpeedSwap<B>,
        u32,
        &mut dyn FnMut(&mut HighSpeedSwap<B>, &Sequence) -> Result<(), Failure>,
    ) -> Result<(), Failure>,
) -> Result<Vec<u32>, Failure> {
    let q = view(backend, swap, &Tensor::normal(Dtype::F32, [1, 2, 16], 19))?;
    let out = backend.alloc("test output", u64::from(count) * 256)?;
    backend.fill(swap.stream(), &out, 0, u64::from(count) * 256, u32::MAX)?;
    for round in 0..count {
        let mut attend = |swap: &mut HighSpeedSwap<B>, seq: &Sequence| {
            let here = View { offset: u64::from(round) * 256, ..View::dense(out.clone(), Dtype::F32, 2, 16) };
            Ok(swap.attend(0, &Query::new(&[Rows::decode(seq)], q.clone(), here))?)
        };
        step(swap, round, &mut attend)?;
    }
    let mut bits = vec![0; count as usize * 64];
    swap.download(&out, 0, bytemuck::cast_slice_mut(&mut bits))?;
    Ok(bits.chunks_exact(64).flat_map(|row| row[..32].to_vec()).collect())
}

/// B37: a page is written, sent away and attended at once, 150 times, without a wait of the caller.
pub(super) fn marker_rounds<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let (mut swap, _) = Setup::new(kind, format, 16, 17).build(backend)?;
        let mut seqs = Vec::new();
        let got = rounds(backend, &mut swap, 150, |swap, round, attend| {
            let seq = swap.begin();
            append(backend, swap, 0, &[(&seq, None, 16)], &uniform(16, 0.0, marker(round, format)))??;
            swap.offload(&seq)?;
            check.holds("the page gave up its frame", swap.evict(&seq)? == 1);
            attend(swap, &seq)?;
            seqs.push(seq);
            seqs.drain(..seqs.len().saturating_sub(40));
            Ok(())
        })?;
        let want: Vec<u32> = (0..150).flat_map(|round| [marker(round, format).to_bits(); 32]).collect();
        check.bits("markers", &got, &want);
        check.holds("every page came back", swap.stats().streamed_pages == 150);
        check.done()
    })
}

/// B39: two sequences that do not fit together, attended in turns without a wait.
pub(super) fn alternating<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for layer_ahead in [false, true] {
            let (mut swap, _) =
                Setup::new(kind, format, 64, 5).config(|c| c.layer_ahead = layer_ahead).build(backend)?;
            let seqs = [swap.begin(), swap.begin()];
            for (seq, value) in seqs.iter().zip([1, 2]) {
                append(backend, &mut swap, 0, &[(seq, None, 256)], &uniform(256, 0.0, marker(value, format)))??;
            }
            let got = rounds(backend, &mut swap, 300, |swap, round, attend| attend(swap, &seqs[round as usize % 2]))?;
            let want: Vec<u32> = (0..300).flat_map(|round| [marker(1 + round % 2, format).to_bits(); 32]).collect();
            check.bits("alternating sequences", &got, &want);
            check.holds("they pushed each other out", swap.stats().streamed_pages >= 250);
            drop(seqs);
            swap.synchronize()?;
            check.holds("the books agree", swap.is_consistent() && swap.stats().store.held_pages == 0);
        }
        check.done()
    })
}

/// A1: inputs, sequences and the cache itself go while pages travel and kernels wait.
pub(super) fn dropped_under_way<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let setup = Setup::new(kind, format, 64, 12).config(|c| c.write_out = WriteOut::Eager);
        let mut twin = Twin::new(backend, &setup)?;
        for round in 0..12u64 {
            twin.faults.plan().delay = (round % 4) as u32 * 3;
            let seq = twin.begin();
            twin.write(0, &[(seq, None, 640)], round)?;
            if round % 3 == 1 {
                twin.send_away(seq)?;
                twin.swap.prefetch(0, &twin.seqs[seq].swap, 0..4)?;
            }
            if twin.seqs.len() > 2 {
                twin.seqs.remove((round % 3) as usize);
            }
            let all: Vec<_> = (0..twin.seqs.len()).map(|seq| (seq, See::Tail(1))).collect();
            twin.attend(0, &all, round, &mut check)?;
            check.holds("the books agree", twin.swap.is_consistent());
        }
        twin.finish(&mut check)?;

        let (mut swap, _) = setup.build(backend)?;
        let seq = swap.begin();
        append(backend, &mut swap, 0, &[(&seq, None, 1024)], &uniform(1024, 0.0, marker(7, format)))??;
        let q = view(backend, &mut swap, &Tensor::normal(Dtype::F32, [1, 2, 16], 1))?;
        let out = backend.alloc("test output", 128)?;
        swap.attend(0, &Query::new(&[Rows::decode(&seq)], q, View::dense(out.clone(), Dtype::F32, 2, 16)))?;
        let done = backend.record(swap.stream())?;
        drop(seq);
        drop(swap);
        backend.finish(&done)?;
        let mut bits = [0u32; 32];
        backend.download(&mut backend.stream()?, &out, 0, bytemuck::cast_slice_mut(&mut bits))?;
        check.bits("attention whose cache is gone", &bits, &[marker(7, format).to_bits(); 32]);
        check.done()
    })
}
