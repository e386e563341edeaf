//! The same calls to a cache whose pages leave the device and to one whose pages never do: the simplest oracle of
//! contract C1.

use super::super::cache::Cache;
use super::super::check::{Check, Failure};
use super::super::store::{try_attend, try_context, upload};
use super::super::values::Tensor;
use super::faulty::Faults;
use super::{Setup, bottom};
use crate::store::{Append, PagedStore, Rows, Sequence, StoreConfig};
use crate::swap::HighSpeedSwap;
use crate::{Backend, Dtype, Error, View};

/// New tokens: which sequence, from which token on (`None`: at the end), how many.
pub(super) type Write = (usize, Option<u64>, u32);

/// What query rows see of a sequence.
#[derive(Debug, Clone, Copy)]
pub(super) enum See {
    Tail(u32),
    At(u64, u32),
    Window(u32, u64),
    Full(u32),
}

impl See {
    fn rows(self, seq: &Sequence) -> Rows<'_> {
        match self {
            See::Tail(count) => Rows::tail(seq, count),
            See::At(first, count) => Rows::at(seq, first, count),
            See::Window(count, tokens) => Rows::tail(seq, count).window(tokens),
            See::Full(count) => Rows::tail(seq, count).full(),
        }
    }

    fn count(self) -> u32 {
        match self {
            See::Tail(count) | See::At(_, count) | See::Window(count, _) | See::Full(count) => count,
        }
    }
}

/// One sequence in both caches.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) plain: Sequence,
    pub(super) swap: Sequence,
}

/// Both caches. What the swap refuses is not asked of the other, so both hold the same afterwards.
#[derive(Debug)]
pub(super) struct Twin<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) plain: PagedStore<B>,
    pub(super) swap: HighSpeedSwap<B>,
    pub(super) faults: Faults,
    pub(super) seqs: Vec<Pair>,
}

impl<'a, B: Backend> Twin<'a, B> {
    pub(super) fn new(backend: &'a B, setup: &Setup) -> Result<Self, Failure> {
        let (swap, faults) = setup.build(backend)?;
        let config = StoreConfig { state_bytes: setup.config.state_bytes, ..StoreConfig::default() };
        let plain = PagedStore::with_config(backend.clone(), setup.geometry, config)?;
        Ok(Twin { backend, plain, swap, faults, seqs: Vec::new() })
    }

    pub(super) fn begin(&mut self) -> usize {
        self.seqs.push(Pair { plain: self.plain.begin(), swap: self.swap.begin() });
        self.seqs.len() - 1
    }

    pub(super) fn fork(&mut self, seq: usize) -> Result<usize, Failure> {
        let of = &self.seqs[seq];
        let pair = Pair { plain: self.plain.fork(&of.plain)?, swap: self.swap.fork(&of.swap)? };
        self.seqs.push(pair);
        Ok(self.seqs.len() - 1)
    }

    pub(super) fn fork_at(&mut self, seq: usize, tokens: u64) -> Result<usize, Failure> {
        let of = &self.seqs[seq];
        let pair = Pair { plain: self.plain.fork_at(&of.plain, tokens)?, swap: self.swap.fork_at(&of.swap, tokens)? };
        self.seqs.push(pair);
        Ok(self.seqs.len() - 1)
    }

    pub(super) fn truncate(&mut self, seq: usize, tokens: u64) -> Result<(), Failure> {
        self.plain.truncate(&self.seqs[seq].plain, tokens)?;
        Ok(self.swap.truncate(&self.seqs[seq].swap, tokens)?)
    }

    /// Writes random tokens, the same ones for the same seed. What the swap refused is in the inner result.
    pub(super) fn try_write(
        &mut self,
        layer: usize,
        writes: &[Write],
        seed: u64,
    ) -> Result<crate::Result<()>, Failure> {
        let geometry = *self.swap.geometry();
        let total = writes.iter().map(|write| write.2).sum::<u32>().max(1);
        let tensor = |dim, seed| Tensor::normal(Dtype::F32, [total, geometry.kv_heads(), dim], seed);
        let kv = [tensor(geometry.k_dim(), seed), tensor(geometry.v_dim(), seed ^ 0x5a5a)];
        let swap: Vec<_> = writes.iter().map(|&(seq, at, tokens)| (&self.seqs[seq].swap, at, tokens)).collect();
        if let Err(error) = append(self.backend, &mut self.swap, layer, &swap, &kv)? {
            return Ok(Err(error));
        }
        let plain: Vec<_> = writes.iter().map(|&(seq, at, tokens)| (&self.seqs[seq].plain, at, tokens)).collect();
        append(self.backend, &mut self.plain, layer, &plain, &kv)??;
        Ok(Ok(()))
    }

    pub(super) fn write(&mut self, layer: usize, writes: &[Write], seed: u64) -> Result<(), Failure> {
        Ok(self.try_write(layer, writes, seed)??)
    }

    /// Attends random queries in both caches, in one call each, and compares all bits.
    pub(super) fn try_attend(
        &mut self,
        layer: usize,
        looks: &[(usize, See)],
        seed: u64,
        check: &mut Check,
    ) -> Result<crate::Result<()>, Failure> {
        let geometry = *self.swap.geometry();
        let rows = looks.iter().map(|(_, see)| see.count()).sum();
        let q = Tensor::normal(Dtype::F32, [rows, geometry.q_heads(), geometry.k_dim()], seed);
        let swap: Vec<Rows<'_>> = looks.iter().map(|(seq, see)| see.rows(&self.seqs[*seq].swap)).collect();
        let got = match try_attend(self.backend, &mut self.swap, layer, &swap, &q)? {
            Ok(got) => got,
            Err(error) => return Ok(Err(error)),
        };
        let plain: Vec<Rows<'_>> = looks.iter().map(|(seq, see)| see.rows(&self.seqs[*seq].plain)).collect();
        let want = try_attend(self.backend, &mut self.plain, layer, &plain, &q)??;
        check.bits("attention over pages that leave", &got.0, &want.0);
        check.bits("log-sum-exp over pages that leave", &got.1, &want.1);
        Ok(Ok(()))
    }

    pub(super) fn attend(
        &mut self,
        layer: usize,
        looks: &[(usize, See)],
        seed: u64,
        check: &mut Check,
    ) -> Result<(), Failure> {
        Ok(self.try_attend(layer, looks, seed, check)??)
    }

    /// Compares the bits that a sequence holds.
    pub(super) fn try_context(
        &mut self,
        layer: usize,
        seq: usize,
        check: &mut Check,
    ) -> Result<crate::Result<()>, Failure> {
        let got = match try_context(&mut self.swap, layer, &self.seqs[seq].swap)? {
            Ok(got) => got,
            Err(error) => return Ok(Err(error)),
        };
        let want = try_context(&mut self.plain, layer, &self.seqs[seq].plain)??;
        check.bits("keys of a context", &got.0, &want.0);
        check.bits("values of a context", &got.1, &want.1);
        Ok(Ok(()))
    }

    pub(super) fn context(&mut self, layer: usize, seq: usize, check: &mut Check) -> Result<(), Failure> {
        Ok(self.try_context(layer, seq, check)??)
    }

    pub(super) fn len(&self, layer: usize, seq: usize) -> u64 {
        self.plain.len(&self.seqs[seq].plain, layer).unwrap_or(0)
    }

    /// Every sequence in every layer: contexts and a decode step of all.
    pub(super) fn compare_all(&mut self, seed: u64, check: &mut Check) -> Result<(), Failure> {
        for layer in 0..self.swap.geometry().layers() as usize {
            let all: Vec<_> = (0..self.seqs.len()).map(|seq| (seq, See::Tail(1))).collect();
            self.attend(layer, &all, seed + layer as u64, check)?;
            (0..self.seqs.len()).try_for_each(|seq| self.context(layer, seq, check))?;
        }
        check.holds("the swap's books agree", self.swap.is_consistent());
        Ok(())
    }

    /// Writes a sequence out and takes all frames of its pages away.
    pub(super) fn send_away(&mut self, seq: usize) -> Result<u64, Failure> {
        self.swap.offload(&self.seqs[seq].swap)?;
        Ok(self.swap.evict(&self.seqs[seq].swap)?)
    }

    /// Drops everything; nothing may be left on the device or in the tier.
    pub(super) fn finish(mut self, check: &mut Check) -> Result<(), Failure> {
        self.seqs.clear();
        let _ = self.swap.synchronize();
        let stats = self.swap.stats();
        let left = (stats.store.held_pages, stats.pinned_pages, bottom(&stats).used_pages);
        check.holds(&format!("nothing is left (pages, pins, slots: {left:?})"), left == (0, 0, 0));
        check.holds("the swap's books agree at the end", self.swap.is_consistent());
        Ok(())
    }
}

/// Appends tokens that follow each other in `kv` to some sequences.
pub(super) fn append<B: Backend>(
    backend: &B,
    cache: &mut impl Cache<B>,
    layer: usize,
    writes: &[(&Sequence, Option<u64>, u32)],
    [k, v]: &[Tensor; 2],
) -> Result<crate::Result<()>, Failure> {
    let heads = cache.geometry().kv_heads();
    let k_view = View::dense(upload(backend, cache, k)?, k.dtype, heads, k.shape[2] as u32);
    let v_view = View::dense(upload(backend, cache, v)?, v.dtype, heads, v.shape[2] as u32);
    let mut row = 0;
    let mut appends = Vec::new();
    for &(seq, at, tokens) in writes {
        let one = Append::new(seq, tokens, k_view.clone().from_row(row), v_view.clone().from_row(row));
        appends.push(at.map_or(one.clone(), |at| one.at(at)));
        row += u64::from(tokens);
    }
    Ok(cache.append(layer, &appends))
}

/// An error that says that something did not fit.
pub(super) fn is_full(error: &Error) -> bool {
    matches!(error, Error::NothingEvictable { .. } | Error::TierFull { .. } | Error::PageLimit { .. })
}
