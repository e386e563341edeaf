//! Is bad input refused with its own error, and the store left as it was?

use super::super::check::{Failure, Verdict};
use super::super::values::{Tensor, natural};
use super::{attend_bits, context_bits, measure_zero, small, tokens, view, write};
use crate::store::{Append, NonFinite, PagedStore, Query, Rows, StoreConfig};
use crate::{Backend, Dtype, Error, Geometry, PageFormat, View};

/// Wrong calls of every kind: each gives its error, and bytes, lengths and page counts stay the same.
pub(super) fn bad_input<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut store = small(backend, format, 6)?;
    let mut stranger = small(backend, format, 6)?;
    let foreign = stranger.begin();
    let seq = store.begin();
    let (k, v) = (tokens(Dtype::F32, 20, 1), tokens(Dtype::F32, 20, 2));
    write(backend, &mut store, &seq, &k, &v)?;
    let fork = store.fork(&seq)?;
    let (k, v) = (view(backend, &mut store, &k)?, view(backend, &mut store, &v)?);
    let before = (context_bits(&mut store, 0, &seq)?, store.stats());
    let append = |seq, n| Append::new(seq, n, k.clone(), v.clone());
    let strided = |strides| View { strides, ..k.clone() };
    let halved = |view: &View<B::Buffer>| View { dtype: Dtype::F16, ..view.clone() };
    let shifted = |offset| View { offset, ..k.clone() };
    let mut wrong = Vec::new();
    let mut expect = |what, ok: bool| {
        if !ok {
            wrong.push(what);
        }
    };
    use Error as E;
    expect("unknown sequence", matches!(store.append(0, &[append(&foreign, 1)]), Err(E::UnknownSequence { .. })));
    expect(
        "unknown layer",
        matches!(store.append(1, &[append(&seq, 1)]), Err(E::UnknownLayer { layer: 1, layers: 1 })),
    );
    let twice = [append(&seq, 1), append(&seq, 1)];
    expect("named twice", matches!(store.append(0, &twice), Err(E::DuplicateSequence { .. })));
    let past = store.append(0, &[append(&seq, 1).at(21)]);
    expect("offset past the end", matches!(past, Err(E::OffsetPastEnd { layer: 0, offset: 21, len: 20 })));
    expect("too few rows", matches!(store.append(0, &[append(&seq, 21)]), Err(E::OutOfBounds { what: "K", .. })));
    let wide = Append::new(&seq, 20, strided([32, 16, 2]), v.clone());
    expect("strides past the buffer", matches!(store.append(0, &[wide]), Err(E::OutOfBounds { .. })));
    let far = Append::new(&seq, 2, strided([u64::MAX, 16, 1]), v.clone());
    expect("overflowing strides", matches!(store.append(0, &[far]), Err(E::OutOfBounds { .. })));
    let mixed = Append::new(&seq, 2, k.clone(), halved(&v));
    expect("two dtypes", matches!(store.append(0, &[mixed]), Err(E::Shape { .. })));
    let crooked = Append::new(&seq, 1, shifted(2), v.clone());
    expect("a crooked offset", matches!(store.append(0, &[crooked]), Err(E::Misaligned { .. })));
    let full = store.append(0, &[append(&seq, 20).at(0), append(&fork, 20)]);
    expect("page limit", matches!(full, Err(E::PageLimit { layer: 0, maximum: 6, .. })));
    expect("fork past the end", matches!(store.fork_at(&seq, 21), Err(E::OffsetPastEnd { .. })));
    expect("truncate past the end", matches!(store.truncate(&seq, 21), Err(E::OffsetPastEnd { .. })));
    expect("reserve too much", matches!(store.reserve(&seq, 1000), Err(E::PageLimit { .. })));
    expect("preflight too much", matches!(store.preflight(&[(&seq, 1000)]), Err(E::PageLimit { .. })));

    let vast = store.preflight(&[(&seq, 4_000_000_000)]);
    expect("preflight of a vast step", matches!(vast, Err(E::PageLimit { .. })));
    let itself = context_view(&mut store, &seq)?;
    let alias = Append::new(&seq, 1, itself.clone(), itself);
    expect("K in the pages themselves", matches!(store.append(0, &[alias.at(0)]), Err(E::Unsupported { .. })));

    let q = view(backend, &mut store, &Tensor::normal(Dtype::F32, [1, 4, 16], 3))?;
    let out = View::dense(backend.alloc("test output", 256)?, Dtype::F32, 4, 16);
    let rows = [Rows::decode(&seq)];
    for scale in [f32::NAN, 0.0, -1.0, f32::INFINITY] {
        let answer = store.attend(0, &Query::new(&rows, q.clone(), out.clone()).scale(scale));
        expect("scale", matches!(answer, Err(E::Scale { .. })));
    }
    let two = [Rows::tail(&seq, 2)];
    let short = store.attend(0, &Query::new(&two, q.clone(), out.clone()));
    expect("too few queries", matches!(short, Err(E::OutOfBounds { what: "Q", .. })));
    let late = [Rows::at(&seq, 20, 1)];
    let answer = store.attend(0, &Query::new(&late, q.clone(), out.clone()));
    expect("a position past the end", matches!(answer, Err(E::OffsetPastEnd { offset: 21, len: 20, .. })));
    let many = [Rows::tail(&seq, u32::MAX)];
    let one_row = |view: &View<B::Buffer>| View { strides: [0, 16, 1], ..view.clone() };
    let answer = store.attend(0, &Query::new(&many, one_row(&q), one_row(&out)));
    expect("rows that share their output", matches!(answer, Err(E::Shape { .. })));
    let odd = View { strides: [64, 16, 2], ..out.clone() };
    expect("output strides", store.attend(0, &Query::new(&rows, q.clone(), odd)).is_err());
    let lse = View::dense(out.buffer.clone(), Dtype::F16, 4, 1);
    let answer = store.attend(0, &Query::new(&rows, q.clone(), out.clone()).lse(lse));
    expect("log-sum-exp dtype", matches!(answer, Err(E::Shape { .. })));
    let answer = store.attend(0, &Query::new(&[Rows::decode(&foreign)], q, out));
    expect("attend an unknown sequence", matches!(answer, Err(E::UnknownSequence { .. })));

    let after = (context_bits(&mut store, 0, &seq)?, store.stats());
    // Refused calls may have grown the pool by free pages; nothing else.
    let books = |s: &crate::Stats| (s.held_pages, s.shared_pages, s.reserved_pages, s.sequences, s.appended_tokens);
    expect("bytes unchanged", before.0 == after.0);
    expect("counts unchanged", books(&before.1) == books(&after.1) && store.is_consistent());
    if wrong.is_empty() { Ok(measure_zero("bad input".into())) } else { Err(Failure(wrong.join(", "))) }
}

/// A sequence's own pages as an input tensor.
fn context_view<B: Backend>(store: &mut PagedStore<B>, seq: &crate::Sequence) -> Result<View<B::Buffer>, Failure> {
    let context = store.context(0, seq)?;
    let dtype = natural(store.geometry().page_format());
    Ok(View { offset: context.offset, ..View::dense(context.buffer, dtype, 2, 16) })
}

/// Memory of another device of the same kind is refused. `other` is a second opening of the backend.
pub(in super::super) fn foreign_memory<B: Backend>(backend: &B, other: &B) -> Verdict {
    let mut store = small(backend, PageFormat::F32, 8)?;
    let mut theirs = small(other, PageFormat::F32, 8)?;
    let seq = store.begin();
    let t = tokens(Dtype::F32, 3, 1);
    let (mine, foreign) = (view(backend, &mut store, &t)?, view(other, &mut theirs, &t)?);
    let answer = store.append(0, &[Append::new(&seq, 3, mine, foreign)]);
    match answer {
        Err(Error::WrongDevice { what: "V" }) => Ok(measure_zero("foreign memory".into())),
        other => Err(Failure(format!("V of another device: {other:?}"))),
    }
}

/// A pool that the device cannot address is refused with the limit's name (B01's kind).
pub(super) fn unaddressable_pool<B: Backend>(backend: &B) -> Verdict {
    let config = StoreConfig { page_limit: Some(u64::MAX / 2), ..StoreConfig::default() };
    match PagedStore::with_config(backend.clone(), Geometry::new(1, 8, 8, 128), config) {
        Err(Error::Limit { need, have, .. }) if need > have => Ok(measure_zero("an unaddressable pool".into())),
        other => Err(Failure(format!("{other:?}"))),
    }
}

/// Non-finite elements are kept and counted, or refused with nothing changed.
pub(super) fn non_finite<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let geometry = Geometry::new(1, 4, 2, 16).page_size(8).format(format);
    let config = StoreConfig { non_finite: NonFinite::Refuse, ..StoreConfig::default() };
    let (mut keep, mut refuse) =
        (small(backend, format, 64)?, PagedStore::with_config(backend.clone(), geometry, config)?);
    let good = tokens(natural(format), 9, 1);
    let mut bad = tokens(Dtype::F32, 9, 2);
    (bad.bits[5], bad.bits[77], bad.bits[200]) = (0x7f80_0000, 0xff80_0000, 0x7fc0_0001);
    let (kept, refused) = (keep.begin(), refuse.begin());
    write(backend, &mut keep, &kept, &bad, &bad)?;
    write(backend, &mut refuse, &refused, &good, &good)?;
    let before = context_bits(&mut refuse, 0, &refused)?;
    let (k, v) = (view(backend, &mut refuse, &bad)?, view(backend, &mut refuse, &bad)?);
    let answers = [
        refuse.append(0, &[Append::new(&refused, 9, k.clone(), v.clone())]),
        refuse.append(0, &[Append::new(&refused, 9, k, v).at(0)]),
    ];
    let same = context_bits(&mut refuse, 0, &refused)? == before && refuse.len(&refused, 0)? == 9;
    let counts = (keep.non_finite()?, keep.len(&kept, 0)?);
    let all_refused = answers.iter().all(|answer| *answer == Err(Error::NonFinite { count: 6 }));
    if !(all_refused && same && counts == (6, 9)) {
        return Err(Failure(format!("{answers:?}, unchanged: {same}, (counted, kept): {counts:?}")));
    }
    // A row that does not see the bad token is right.
    let q = Tensor::normal(Dtype::F32, [1, 4, 16], 3);
    write(backend, &mut refuse, &refused, &good, &good)?;
    let (out, _) = attend_bits(backend, &mut refuse, 0, &[Rows::decode(&refused)], &q)?;
    let finite = out.iter().all(|&bits| f32::from_bits(bits).is_finite());
    if finite { Ok(measure_zero("non-finite values".into())) } else { Err(Failure("an output is not finite".into())) }
}

/// The preflight of a step says exactly what the step then takes, and refuses what the step would be refused.
pub(super) fn preflight<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let mut store = small(backend, format, 8)?;
    let (k, v) = (tokens(Dtype::F32, 20, 1), tokens(Dtype::F32, 20, 2));
    let parent = store.begin();
    write(backend, &mut store, &parent, &k, &v)?;
    let forks = [store.fork(&parent)?, store.fork(&parent)?];
    let plan = store.preflight(&[(&parent, 1), (&forks[0], 1), (&forks[1], 5)])?;
    // Three owners of the partial page: two copies; the third writes in place and needs one page more.
    if (plan.new_pages, plan.copied_pages) != (1, 2) {
        return Err(Failure(format!("three writers of one page: {plan:?}")));
    }
    let before = store.stats();
    let (k, v) = (view(backend, &mut store, &k)?, view(backend, &mut store, &v)?);
    let step = |n: [u32; 3]| {
        let append = |seq, n| Append::new(seq, n, k.clone(), v.clone());
        [append(&parent, n[0]), append(&forks[0], n[1]), append(&forks[1], n[2])]
    };
    store.append(0, &step([1, 1, 5]))?;
    let after = store.stats();
    let took = (after.held_pages - before.held_pages, after.copied_pages - before.copied_pages);
    let refused = store.preflight(&[(&parent, 17), (&forks[0], 17), (&forks[1], 1)]);
    let answer = store.append(0, &step([17, 17, 1]));
    if took == (3, 2) && refused.is_err() && answer == refused.map(|_| ()) {
        Ok(measure_zero("preflight".into()))
    } else {
        Err(Failure(format!("took {took:?} pages; the refused step: {answer:?}")))
    }
}
