//! A decode step that a CUDA graph can hold: what it reads lies in device memory, and moves on by a token at a time.

mod advance;
mod call;
mod plan;

use super::sequence::StoreId;
use super::write::MAX_TOKENS;
use super::{NonFinite, PagedStore, Sequence};
use crate::attention::plan_for;
use crate::backend::Backend;
use crate::{DeviceBuffer, Error, Result};
use plan::{Descriptors, WindowPlan, most_visible};

/// A decode step: one more token for each of some sequences in every layer, again and again.
///
/// [`advance`](PagedStore::advance) makes room for the next token of each sequence and tells the device, in memory that
/// stays where it is, how long the sequences are and where their pages lie. [`append_step`](PagedStore::append_step) and
/// [`attend_step`](PagedStore::attend_step) then do what [`append`](PagedStore::append) and
/// [`attend`](PagedStore::attend) would do, to the bit. On every backend they may simply be called, layer by layer.
///
/// # CUDA graphs
/// On CUDA both calls may be made while the store's stream (one of the caller's: [`PagedStore::on_stream`]) is captured, and a
/// replay of the graph serves the next token:
///
/// ```no_run
/// # use kvtide::{Backend, Capture, PagedStore, Query, Result, Step, View};
/// # struct Graph;
/// # impl Graph { fn launch(&self) {} }
/// # fn capture(_: impl FnOnce()) -> Graph { Graph }
/// # fn decode<B: Backend>(store: &mut PagedStore<B>, seqs: &[&kvtide::Sequence], k: View<B::Buffer>, v: View<B::Buffer>,
/// #     q: View<B::Buffer>, out: View<B::Buffer>) -> Result<()> {
/// let mut step = store.step(seqs, 4096)?; // until the longest sequence holds 4,096 tokens
/// let mut graph = None;
/// loop {
///     if store.advance(&mut step)? == Capture::Stale {
///         graph = Some(capture(|| {
///             for layer in 0..store.geometry().layers() as usize {
///                 // … the engine's own kernels …
///                 store.append_step(&step, layer, &k, &v).unwrap();
///                 store.attend_step(&step, layer, &Query::of_step(q.clone(), out.clone())).unwrap();
///             }
///         }));
///     }
///     graph.as_ref().unwrap().launch(); // on the store's stream
///     # break;
/// }
/// # Ok(()) }
/// ```
///
/// A replay is work that the store does not see. It belongs between an `advance` and the next call that changes the
/// sequences; the step and the store must outlive it. While the stream is captured every other call that has work for it is
/// refused (and one that has to allocate ends the capture, as the driver has it). Launches are configured for the longest
/// length, so a step for lengths that are far from it wastes blocks.
#[derive(Debug)]
pub struct Step<Buf> {
    store: StoreId,
    sequences: Vec<u64>,
    max_tokens: u64,
    descriptors: Descriptors,
    /// The page tables and the descriptors.
    memory: Buf,
    states: Buf,
    /// The edition of each page table, by layer and row, that the device has; `None` where it has none.
    known: Vec<Option<u64>>,
    /// What captured launches have in their arguments: how many slabs, and the channels.
    captured: Option<(usize, Option<Buf>)>,
}

/// Whether launches of a [`Step`] that were captured before still serve it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a replay of stale launches would write to pages that they do not know"]
pub enum Capture {
    /// They do.
    Valid,
    /// The pool has grown, or nothing can have been captured yet: capture again before the next replay.
    Stale,
}

impl<Buf> Step<Buf> {
    /// Sequences of the step: rows of K, V, queries and outputs, in the order that they were given in.
    pub fn rows(&self) -> usize {
        self.sequences.len()
    }

    /// Tokens that a sequence may come to.
    pub fn max_tokens(&self) -> u64 {
        self.max_tokens
    }
}

impl<B: Backend> PagedStore<B> {
    /// A step of these sequences, until one of them holds `max_tokens` tokens in some layer.
    ///
    /// Allocates what the step needs but for pages: page tables, descriptors and attention states for `max_tokens`. Pages
    /// come from the pool as they are needed; [`reserve`](Self::reserve) takes them in advance, so that the pool need not
    /// grow, which makes a capture [`Stale`](Capture::Stale).
    ///
    /// # Errors
    /// Unknown or twice-named sequences, or none; [`Error::TooLarge`] where one is longer than `max_tokens` already;
    /// [`Error::PageLimit`] where the pool could never hold so many; [`Error::Unsupported`] in a store that refuses values
    /// which are not finite ([`NonFinite::Refuse`]): its appends wait for the device; no memory.
    pub fn step(&mut self, seqs: &[&Sequence], max_tokens: u64) -> Result<Step<B::Buffer>> {
        self.step_windowed(seqs, max_tokens, |_| None)
    }

    /// The same with a window for some layers, by number: see [`Rows::window`](super::Rows::window).
    ///
    /// # Errors
    /// Those of [`step`](Self::step), and [`Error::Shape`] for a window of no tokens.
    pub fn step_windowed(
        &mut self,
        seqs: &[&Sequence],
        max_tokens: u64,
        window: impl Fn(usize) -> Option<u64>,
    ) -> Result<Step<B::Buffer>> {
        self.reap();
        let layers = self.geometry().layers() as usize;
        self.check_step(seqs, max_tokens)?;
        let windows: Vec<_> = (0..layers).map(window).collect();
        if windows.contains(&Some(0)) {
            return Err(Error::Shape { what: "a step's window", got: 0, expected: 1 });
        }
        let (rows, pages) = (seqs.len(), self.geometry().pages_for(max_tokens));
        let (value, maximum) = (Descriptors::table_words(layers, rows, pages), u64::from(u32::MAX / 2));
        if value > maximum {
            return Err(Error::TooLarge { what: "the words of a step's page tables", value, maximum });
        }
        let descriptors = self.describe(&windows, rows, max_tokens as u32, pages);
        let largest = (0..layers).flat_map(|layer| &descriptors.plan(layer).batches).map(|batch| batch.states).max();
        self.pool.counter()?;
        self.pool.ready_channels()?;
        let pool = &mut self.pool;
        let states = u64::from(largest.unwrap_or(0)) * pool.state_bytes();
        let states = pool.backend.alloc("kvtide step states", states.max(256))?;
        let memory = pool.backend.alloc("kvtide step", descriptors.bytes())?;
        let (offset, bytes) = descriptors.all();
        pool.backend.upload(&mut pool.stream, &memory, offset, bytes)?;
        Ok(Step {
            store: self.id,
            sequences: seqs.iter().map(|seq| seq.id()).collect(),
            max_tokens,
            descriptors,
            memory,
            states,
            known: vec![None; layers * rows],
            captured: None,
        })
    }

    /// Refuses sequences, lengths and stores that a step cannot be made of.
    fn check_step(&self, seqs: &[&Sequence], max_tokens: u64) -> Result<()> {
        if self.config.non_finite == NonFinite::Refuse {
            let format = "a store that refuses values which are not finite".into();
            return Err(Error::Unsupported { backend: self.pool.backend.caps().backend, operation: "step", format });
        }
        self.check_distinct(seqs.iter().copied())?;
        let lens = seqs.iter().flat_map(|seq| &self.sequences[&seq.id()]).map(|pages| pages.len);
        let Some(longest) = lens.max() else {
            return Err(Error::Shape { what: "the sequences of a step", got: 0, expected: 1 });
        };
        let too_large = |what, value, maximum| Err(Error::TooLarge { what, value, maximum });
        if max_tokens > MAX_TOKENS {
            return too_large("the tokens of a step's sequence", max_tokens, MAX_TOKENS);
        }
        if longest > max_tokens {
            return too_large("the tokens of a step's sequence", longest, max_tokens);
        }
        let (required, maximum) = (self.geometry().pages_for(max_tokens), self.pool.page_limit);
        if required > maximum { Err(Error::PageLimit { layer: 0, required, maximum }) } else { Ok(()) }
    }

    /// Plans each window once, for rows that see the most they may.
    fn describe(&self, windows: &[Option<u64>], rows: usize, max_tokens: u32, pages: u64) -> Descriptors {
        let mut plans: Vec<WindowPlan> = Vec::new();
        let mut layers = Vec::new();
        for window in windows {
            let window = window.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
            let found = plans.iter().position(|plan| plan.window == window);
            layers.push(found.unwrap_or_else(|| {
                let visible: Vec<_> = (0..rows as u32).map(|row| most_visible(max_tokens, window, row)).collect();
                let caps = self.pool.backend.caps();
                let batches = plan_for(&visible, self.geometry(), caps, self.max_states());
                plans.push(WindowPlan { window, batches });
                plans.len() - 1
            }));
        }
        Descriptors::new(plans, layers, rows, pages)
    }
}

/// What captured launches would have in their arguments now differs from what they have.
fn has_moved<Buf: DeviceBuffer>(then: &Option<(usize, Option<Buf>)>, now: &(usize, Option<Buf>)) -> bool {
    let same = |a: &Option<Buf>, b: &Option<Buf>| match (a, b) {
        (Some(a), Some(b)) => a.same_memory(b),
        (None, None) => true,
        _ => false,
    };
    then.as_ref().is_none_or(|then| then.0 != now.0 || !same(&then.1, &now.1))
}
