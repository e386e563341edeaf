//! Does `PagedStore` keep what it was given? Forks, drops, recycled pages, fragmentation, and C1 through the store.

mod model;
mod refusals;

pub(super) use refusals::foreign_memory;

use super::Cases;
use super::cache::{Bits, Cache};
use super::check::{Failure, Measure, Verdict};
use super::values::{self, Rng, Tensor, element, natural};
use crate::store::{Append, PagedStore, Query, Rows, Sequence, StoreConfig};
use crate::{Backend, Dtype, Geometry, PageFormat, View};

/// Adds the cases over a store with pages of this format.
pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let mut add = |weight, name, run: fn(&B, PageFormat) -> Verdict| {
        list.store(format, weight, name, move |backend| run(backend, format));
    };
    add(5_000, "40 tokens in any pieces leave the same bytes", append_in_any_pieces);
    add(5_000, "full last pages, one token at a time", full_last_page);
    add(20_000, "forks dropped in any order", forks_dropped_in_any_order);
    add(50_000, "a survivor among garbage", survivor_among_garbage);
    add(2_500_000, "placement, batch and fork never matter", placement_never_matters);
    add(1_000_000, "1,000 alternating attends", alternating_tables);
    add(5_000, "contexts with and without a copy", contexts);
    add(50_000, "tables for a caller's own kernel", attention_contexts);
    add(5_000, "bad input", refusals::bad_input);
    add(5_000, "non-finite values kept or refused", refusals::non_finite);
    add(5_000, "preflight", refusals::preflight);
    add(1, "an unaddressable pool", |backend, _| refusals::unaddressable_pool(backend));
    add(500_000, "random operations against a naive model", |backend, format| model::drive(backend, format, 1, 400));
    add(4_000_000, "thousands of random operations against a naive model", |backend, format| {
        (2..6).try_fold(measure_zero(String::new()), |_, seed| model::drive(backend, format, seed, 1500))
    });
}

/// A verdict of "no difference".
pub(super) fn measure_zero(what: String) -> Measure {
    Measure { what, error: 0.0, bound: 0.0 }
}

/// The number of differing elements between two lists of bits, as a measure.
pub(super) fn same_bits(what: &str, got: &[u32], want: &[u32]) -> Verdict {
    if got.is_empty() || got.len() != want.len() {
        return Err(Failure(format!("{what}: {} elements against {}", got.len(), want.len())));
    }
    let error = got.iter().zip(want).filter(|(a, b)| a != b).count() as f64;
    Ok(Measure { what: what.into(), error, bound: 0.0 })
}

/// Puts a dense tensor into device memory, on the store's stream.
pub(super) fn upload<B: Backend>(backend: &B, store: &mut impl Cache<B>, t: &Tensor) -> Result<B::Buffer, Failure> {
    let mut words = vec![0; (t.bits.len() * t.dtype.bytes() as usize).div_ceil(4)];
    t.bits.iter().enumerate().for_each(|(at, &bits)| values::set_element(&mut words, at, bits, t.dtype));
    let buffer = backend.alloc("test tensor", words.len() as u64 * 4)?;
    backend.upload(store.stream(), &buffer, 0, bytemuck::cast_slice(&words))?;
    Ok(buffer)
}

/// A dense view of a tensor in new device memory.
pub(super) fn view<B: Backend>(backend: &B, store: &mut impl Cache<B>, t: &Tensor) -> Result<View<B::Buffer>, Failure> {
    let [_, heads, dim] = t.shape;
    Ok(View::dense(upload(backend, store, t)?, t.dtype, heads as u32, dim as u32))
}

/// The type whose bits stand for a format's elements here: its own, or f32 for what codes stand for.
pub(super) fn shown(format: PageFormat) -> Dtype {
    format.dtype().unwrap_or(Dtype::F32)
}

/// What pages of a format hold of a tensor, as bits of the type that is [`shown`].
pub(super) fn stored(t: &Tensor, format: PageFormat) -> Vec<u32> {
    t.stored(format, |_| None)
        .into_iter()
        .zip(&t.bits)
        .map(|(x, &bits)| match format.dtype() {
            Some(to) => values::convert(bits, t.dtype, to),
            None => x.to_bits(),
        })
        .collect()
}

/// A row of a record, whose elements and scale lie so many bytes into `words`, as bits of the type that is [`shown`].
fn row_bits(words: &[u32], format: PageFormat, (at, scale_at): (u64, u64), dim: u32) -> Vec<u32> {
    if let Some(dtype) = format.dtype() {
        let first = (at / dtype.bytes()) as usize;
        return (first..first + dim as usize).map(|at| element(words, at, dtype)).collect();
    }
    let scale = f64::from(f32::from_bits(words[scale_at as usize / 4]));
    let codes: &[i8] = bytemuck::cast_slice(words);
    codes[at as usize..][..dim as usize].iter().map(|&code| ((f64::from(code) * scale) as f32).to_bits()).collect()
}

/// K and V of a sequence as the bits its pages hold: `[token, kv_head, element]`.
pub(super) fn context_bits<B: Backend>(
    store: &mut impl Cache<B>,
    layer: usize,
    seq: &Sequence,
) -> Result<Bits, Failure> {
    Ok(try_context(store, layer, seq)??)
}

/// The same, with the store's refusal apart.
pub(super) fn try_context<B: Backend>(
    store: &mut impl Cache<B>,
    layer: usize,
    seq: &Sequence,
) -> Result<crate::Result<Bits>, Failure> {
    let context = match store.context(layer, seq) {
        Ok(context) => context,
        Err(error) => return Ok(Err(error)),
    };
    let geometry = *store.geometry();
    let format = geometry.page_format();
    let mut words = vec![0u32; (context.pages * context.stride() / 4) as usize];
    store.download(&context.buffer, context.offset, bytemuck::cast_slice_mut(&mut words))?;
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for token in 0..context.tokens {
        for head in 0..geometry.kv_heads() {
            let row = |out: &mut Vec<u32>, at: u64, scale_at: u64, dim: u32| {
                out.extend(row_bits(&words, format, (at - context.offset, scale_at - context.offset), dim));
            };
            row(&mut k, context.key(token, head), context.key_scale(token, head), geometry.k_dim());
            row(&mut v, context.value(token, head), context.value_scale(token, head), geometry.v_dim());
        }
    }
    Ok(Ok((k, v)))
}

/// Attends with f32 output and gives the bits of the output and the log-sum-exp.
pub(super) fn attend_bits<B: Backend>(
    backend: &B,
    store: &mut impl Cache<B>,
    layer: usize,
    rows: &[Rows<'_>],
    q: &Tensor,
) -> Result<Bits, Failure> {
    Ok(try_attend(backend, store, layer, rows, q)??)
}

/// The same, with the store's refusal apart.
pub(super) fn try_attend<B: Backend>(
    backend: &B,
    store: &mut impl Cache<B>,
    layer: usize,
    rows: &[Rows<'_>],
    q: &Tensor,
) -> Result<crate::Result<Bits>, Failure> {
    let (heads, dim) = (store.geometry().q_heads(), store.geometry().v_dim());
    let count = q.rows() * heads;
    let q = view(backend, store, q)?;
    let mut poisoned = |words: u32| {
        let buffer = backend.alloc("test output", u64::from(words) * 4)?;
        backend.fill(store.stream(), &buffer, 0, u64::from(words) * 4, values::poison(Dtype::F32))?;
        Ok::<_, Failure>(buffer)
    };
    let (out, lse) = (poisoned(count * dim)?, poisoned(count)?);
    let lse_view = View::dense(lse.clone(), Dtype::F32, heads, 1);
    let query = Query::new(rows, q, View::dense(out.clone(), Dtype::F32, heads, dim)).lse(lse_view);
    if let Err(error) = store.attend(layer, &query) {
        return Ok(Err(error));
    }
    let mut read = |buffer: &B::Buffer, words: u32| {
        let mut bits = vec![0u32; words as usize];
        store.download(buffer, 0, bytemuck::cast_slice_mut(&mut bits))?;
        Ok::<_, Failure>(bits)
    };
    Ok(Ok((read(&out, count * dim)?, read(&lse, count)?)))
}

/// A small store of one layer: 4 query heads over 2 KV heads of 16 elements, pages of 8.
pub(super) fn small<B: Backend>(backend: &B, format: PageFormat, limit: u64) -> Result<PagedStore<B>, Failure> {
    let config = StoreConfig { step_pages: 4, page_limit: Some(limit), ..StoreConfig::default() };
    Ok(PagedStore::with_config(backend.clone(), Geometry::new(1, 4, 2, 16).page_size(8).format(format), config)?)
}

/// K or V of `tokens` tokens for [`small`].
pub(super) fn tokens(dtype: Dtype, tokens: u32, seed: u64) -> Tensor {
    Tensor::normal(dtype, [tokens, 2, 16], seed)
}

/// Appends K and V to a sequence of [`small`].
pub(super) fn write<B: Backend>(
    backend: &B,
    store: &mut PagedStore<B>,
    seq: &Sequence,
    k: &Tensor,
    v: &Tensor,
) -> Result<(), Failure> {
    let (k_view, v_view) = (view(backend, store, k)?, view(backend, store, v)?);
    Ok(store.append(0, &[Append::new(seq, k.rows(), k_view, v_view)])?)
}

/// One append and many small ones leave the same bytes (bug log B29's kind).
pub(super) fn append_in_any_pieces<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut store = small(backend, format, 64)?;
    let (k, v) = (tokens(natural(format), 40, 1), tokens(natural(format), 40, 2));
    let mut bits = Vec::new();
    for pieces in [vec![40], vec![1; 40], vec![17, 23], vec![8, 8, 24]] {
        let seq = store.begin();
        let mut at = 0;
        for piece in pieces {
            write(backend, &mut store, &seq, &k.slice(at, piece), &v.slice(at, piece))?;
            at += piece;
        }
        let (k_bits, v_bits) = context_bits(&mut store, 0, &seq)?;
        bits.push([k_bits, v_bits].concat());
    }
    let got: Vec<u32> = bits[1..].concat();
    let want = [stored(&k, format), stored(&v, format)].concat().repeat(3);
    same_bits("bytes of 40 tokens in pieces", &got, &want)
}

/// Lengths that fill their last page exactly, one token at a time, with the next page reserved (B36).
pub(super) fn full_last_page<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut store = small(backend, format, 64)?;
    let seq = store.begin();
    store.reserve(&seq, 33)?;
    let (k, v) = (tokens(natural(format), 33, 3), tokens(natural(format), 33, 4));
    let (k_stored, v_stored) = (stored(&k, format), stored(&v, format));
    for token in 0..33 {
        write(backend, &mut store, &seq, &k.slice(token, 1), &v.slice(token, 1))?;
        let (k_bits, v_bits) = context_bits(&mut store, 0, &seq)?;
        let want = [&k_stored[..(token + 1) * 32], &v_stored[..(token + 1) * 32]].concat();
        let same = same_bits("bytes after one more token", &[k_bits, v_bits].concat(), &want)?;
        if !same.passes() {
            return Ok(same);
        }
    }
    Ok(measure_zero("33 tokens one by one".into()))
}

/// Two forks of 20 tokens grow apart and are dropped, with their parent, in all six orders (B31, B32).
pub(super) fn forks_dropped_in_any_order<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let dtype = natural(format);
    let base = (tokens(dtype, 20, 5), tokens(dtype, 20, 6));
    let more = [(tokens(dtype, 30, 7), tokens(dtype, 30, 8)), (tokens(dtype, 30, 9), tokens(dtype, 30, 10))];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut store = small(backend, format, 64)?;
        let parent = store.begin();
        write(backend, &mut store, &parent, &base.0, &base.1)?;
        let forks = [store.fork(&parent)?, store.fork(&parent)?];
        let kept = |t: &Tensor| stored(t, format);
        let mut want = vec![[kept(&base.0), kept(&base.1)].concat()];
        for (fork, (k, v)) in forks.iter().zip(&more) {
            write(backend, &mut store, fork, k, v)?;
            want.push([kept(&base.0), kept(k), kept(&base.1), kept(v)].concat());
        }
        let [first, second] = forks;
        let mut live = [Some(parent), Some(first), Some(second)];
        for gone in order {
            for (seq, want) in live.iter().zip(&want).filter_map(|(seq, want)| Some((seq.as_ref()?, want))) {
                let (k, v) = context_bits(&mut store, 0, seq)?;
                let same = same_bits("bytes of a survivor", &[k, v].concat(), want)?;
                if !same.passes() {
                    return Ok(same);
                }
            }
            live[gone] = None;
        }
        let stats = store.stats();
        if stats.held_pages != 0 || !store.is_consistent() {
            return Err(Failure(format!("order {order:?}: {stats:?} after all were dropped")));
        }
    }
    Ok(measure_zero("six orders".into()))
}

/// A fork outlives its aborted writer while the pool is used up by sequences full of NaN and of huge values (B05, B34,
/// B35): its bytes and its attention stay the same bits.
pub(super) fn survivor_among_garbage<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let dtype = natural(format);
    let mut store = small(backend, format, 12)?;
    let q = Tensor::normal(Dtype::F32, [1, 4, 16], 11);
    let writer = store.begin();
    write(backend, &mut store, &writer, &tokens(dtype, 24, 12), &tokens(dtype, 24, 13))?;
    let survivor = store.fork_at(&writer, 21)?;
    write(backend, &mut store, &writer, &tokens(dtype, 16, 14), &tokens(dtype, 16, 15))?;
    let before = attend_bits(backend, &mut store, 0, &[Rows::decode(&survivor)], &q)?;
    drop(writer);
    for round in 0..6 {
        let huge = if dtype == Dtype::F16 { 6e4 } else { 1e38 };
        let value = if round % 2 == 0 { f32::NAN } else { huge };
        let garbage = Tensor::of(dtype, [8, 2, 16], |_, _, _| value);
        let mut fill = Vec::new();
        loop {
            let seq = store.begin();
            let (k, v) = (view(backend, &mut store, &garbage)?, view(backend, &mut store, &garbage)?);
            if store.append(0, &[Append::new(&seq, 8, k, v)]).is_err() {
                break;
            }
            fill.push(seq);
        }
        let after = attend_bits(backend, &mut store, 0, &[Rows::decode(&survivor)], &q)?;
        fill.clear();
        // A short sequence in recycled pages: their garbage lies right behind its last token.
        let short = store.begin();
        write(backend, &mut store, &short, &tokens(dtype, 5, 16), &tokens(dtype, 5, 17))?;
        let (out, _) = attend_bits(backend, &mut store, 0, &[Rows::decode(&short)], &q)?;
        if !out.iter().all(|&bits| f32::from_bits(bits).abs() < 10.0) {
            return Err(Failure("garbage of a recycled page reached an output".into()));
        }
        let same =
            same_bits("a survivor's attention", &[after.0, after.1].concat(), &[&before.0[..], &before.1].concat())?;
        if !same.passes() {
            return Ok(same);
        }
    }
    Ok(measure_zero("six rounds of garbage".into()))
}

/// Attention of one sequence is the same bits alone and in a batch, in one run of frames and scattered over slabs, as
/// the original and as its fork, in one batch of states and in many (C1).
pub(super) fn placement_never_matters<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let lens = [300u32, 1, 37, 530];
    let data: Vec<_> = lens
        .iter()
        .zip(20..)
        .map(|(&n, seed)| (tokens(Dtype::F32, n, seed), tokens(Dtype::F32, n, 90 + seed)))
        .collect();
    let q = Tensor::normal(Dtype::F32, [6, 4, 16], 18);
    let mut results = Vec::new();
    for (step_pages, state_bytes, piece) in [(256, 64 << 20, 1000), (5, 64 << 20, 9), (40, 1, 16)] {
        let config = StoreConfig { step_pages, state_bytes, ..StoreConfig::default() };
        let geometry = Geometry::new(1, 4, 2, 16).page_size(8).format(format);
        let mut store = PagedStore::with_config(backend.clone(), geometry, config)?;
        let seqs: Vec<Sequence> = lens.iter().map(|_| store.begin()).collect();
        // Small pieces in turn: the sequences' frames interleave.
        for at in (0..530).step_by(piece) {
            for (seq, (k, v)) in seqs.iter().zip(&data).filter(|(_, (k, _))| at < k.shape[0]) {
                let rows = piece.min(k.shape[0] - at);
                write(backend, &mut store, seq, &k.slice(at, rows), &v.slice(at, rows))?;
            }
        }
        let rows = |seqs: &[Sequence]| -> Vec<(usize, u32)> {
            seqs.iter().zip([1, 1, 1, 3]).map(|(_, n)| n).enumerate().collect()
        };
        let mut batched: Vec<Rows<'_>> = Vec::new();
        rows(&seqs).iter().for_each(|&(seq, n)| batched.push(Rows::tail(&seqs[seq], n)));
        let (out, lse) = attend_bits(backend, &mut store, 0, &batched, &q)?;
        results.push([out, lse].concat());
        let forks: Vec<Sequence> = seqs.iter().map(|seq| store.fork(seq)).collect::<Result<_, _>>()?;
        let (mut outs, mut lses, mut at) = (Vec::new(), Vec::new(), 0);
        for &(seq, n) in &rows(&forks) {
            let q = q.slice(at, n as usize);
            let (out, lse) = attend_bits(backend, &mut store, 0, &[Rows::tail(&forks[seq], n)], &q)?;
            outs.extend(out);
            lses.extend(lse);
            at += n as usize;
        }
        results.push([outs, lses].concat());
    }
    let want = results[0].repeat(results.len() - 1);
    same_bits("attention of the same sequences, placed otherwise", &results[1..].concat(), &want)
}

/// 1,000 attends back to back over alternating sequences, without a wait (B39).
pub(super) fn alternating_tables<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut store = small(backend, format, 16)?;
    let zero = Tensor::of(Dtype::F32, [10, 2, 16], |_, _, _| 0.0);
    let value = |x: f32| Tensor::of(Dtype::F32, [10, 2, 16], move |_, _, _| x);
    let seqs = [store.begin(), store.begin()];
    write(backend, &mut store, &seqs[0], &zero, &value(1.0))?;
    write(backend, &mut store, &seqs[1], &zero, &value(2.0))?;
    let q = Tensor::normal(Dtype::F32, [1, 4, 16], 19);
    let q = view(backend, &mut store, &q)?;
    let out = backend.alloc("test output", 1000 * 256)?;
    for round in 0..1000u64 {
        let mut here = View::dense(out.clone(), Dtype::F32, 4, 16);
        here.offset = round * 256;
        store.attend(0, &Query::new(&[Rows::decode(&seqs[round as usize % 2])], q.clone(), here))?;
    }
    let mut bits = vec![0u32; 64_000];
    store.download(&out, 0, bytemuck::cast_slice_mut(&mut bits))?;
    let want: Vec<u32> = (0..64_000).map(|at| (1.0 + (at / 64 % 2) as f32).to_bits()).collect();
    same_bits("1,000 alternating attends", &bits, &want)
}

/// A context is a view without a copy where frames form one run and a gathered copy where not, with the same bytes.
pub(super) fn contexts<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut store = small(backend, format, 64)?;
    let (k, v) = (tokens(natural(format), 40, 21), tokens(natural(format), 40, 22));
    let (run, holes, other) = (store.begin(), store.begin(), store.begin());
    write(backend, &mut store, &run, &k, &v)?;
    let mut rng = Rng::new(23);
    let mut at = 0;
    while at < 40 {
        let piece = (1 + rng.below(9) as usize).min(40 - at);
        write(backend, &mut store, &holes, &k.slice(at, piece), &v.slice(at, piece))?;
        write(backend, &mut store, &other, &k.slice(at, piece), &v.slice(at, piece))?;
        at += piece;
    }
    let gathered = [store.context(0, &run)?.gathered, store.context(0, &holes)?.gathered];
    if gathered != [false, true] {
        return Err(Failure(format!("gathered is {gathered:?} for one run and for interleaved frames")));
    }
    let (a, b) = (context_bits(&mut store, 0, &run)?, context_bits(&mut store, 0, &holes)?);
    let want = [stored(&k, format), stored(&v, format)].concat().repeat(2);
    same_bits("bytes of a view and of a gathered context", &[a.0, a.1, b.0, b.1].concat(), &want)
}

/// The tables that `attention_context` hands out name the frames that hold the sequence.
pub(super) fn attention_contexts<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut store = small(backend, format, 64)?;
    let seqs = [store.begin(), store.begin()];
    let (k, v) = (tokens(natural(format), 300, 24), tokens(natural(format), 300, 25));
    for at in (0..300).step_by(20) {
        let rows = 20.min(300 - at);
        write(backend, &mut store, &seqs[0], &k.slice(at, rows), &v.slice(at, rows))?;
        write(backend, &mut store, &seqs[1], &k.slice(0, 1), &v.slice(0, 1))?;
    }
    let context = store.attention_context(0, &[&seqs[1], &seqs[0]])?;
    let (record, slab_shift, one) = (context.record, context.slab_shift, context.sequences[1]);
    let (slabs, tables) = (context.slabs, context.tables);
    let mut table = vec![0u32; one.pages as usize];
    store.download(&tables, u64::from(one.table) * 4, bytemuck::cast_slice_mut(&mut table))?;
    let mut got = Vec::new();
    for token in 0..one.tokens {
        let (slab, index) = crate::backend::ops::split_frame(table[token as usize / 8], slab_shift);
        let (base, slot) = (u64::from(index) * record.frame_stride(), token as u32 % 8);
        let mut words = vec![0u32; (record.bytes() / 4) as usize];
        store.download(&slabs[slab as usize], base, bytemuck::cast_slice_mut(&mut words))?;
        got.extend(row_bits(&words, format, (record.key(1, slot), record.key_scale(1, slot)), 16));
    }
    let k = stored(&k, format);
    let want: Vec<u32> = (0..300).flat_map(|token| k[token * 32 + 16..token * 32 + 32].to_vec()).collect();
    same_bits("keys found through the device tables", &got, &want)
}
