//! What does a faulty backend do? Everything as another does, but for one deliberate fault.

use super::faults::Fault::{self, *};
use crate::attention::state_words;
use crate::backend::ops::{Append, Arena, Attend, Channels, Fold, Matrices, Merge, Project, Score, Transfer};
use crate::backend::params::{Move, Row, ScoreEntry};
use crate::backend::{Backend, Caps, DeviceBuffer, HostMemory, HostUse, Swap};
use crate::record::Record;
use crate::{Dtype, Error, PageFormat, Result, View};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A backend that does everything as another does, but for one fault.
#[derive(Debug, Clone)]
pub(crate) struct Saboteur<B> {
    honest: B,
    fault: Fault,
    calls: Arc<AtomicU32>,
    /// Host records that have been written.
    written: Arc<Mutex<HashSet<u32>>>,
}

impl<B: Backend> Saboteur<B> {
    pub(crate) fn new(honest: B, fault: Fault) -> Self {
        Saboteur { honest, fault, calls: Arc::default(), written: Arc::default() }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    /// The items that one dimension of a grid holds.
    fn grid<T: Copy>(&self, items: &[T]) -> Vec<T> {
        items[..if self.is(GridOf65535) { items.len().min(65_535) } else { items.len() }].to_vec()
    }

    fn slabs(&self, arena: &Arena<'_, B::Buffer>) -> Vec<B::Buffer> {
        let one = self.is(KnowsOneSlab);
        arena.slabs.iter().map(|slab| if one { &arena.slabs[0] } else { slab }.clone()).collect()
    }

    /// The moves of a swap.
    fn swapped(&self, moves: &[Move]) -> Vec<Move> {
        let mut moves = moves.to_vec();
        if self.is(LosesTheLastSwap) {
            moves.pop();
        }
        if let (true, [first, second, ..]) = (self.is(SwapsTwoRecords), &mut moves[..]) {
            std::mem::swap(&mut first.to, &mut second.to);
        }
        if self.is(SwapsInTheWrongOrder) {
            moves.sort_by_key(|one| one.from);
            let to: Vec<_> = moves.iter().rev().map(|one| one.to).collect();
            moves.iter_mut().zip(to).for_each(|(one, to)| one.to = to);
        }
        moves
    }

    /// Changes the words of some states, a head at a time.
    fn change(
        &self,
        stream: &mut B::Stream,
        states: &B::Buffer,
        (q_heads, v_dim): (u32, u32),
        which: impl Iterator<Item = u32>,
        change: impl Fn(&mut [u32]),
    ) -> Result<()> {
        let head = state_words(v_dim) as usize;
        for state in which {
            let mut words = vec![0u32; q_heads as usize * head];
            let at = u64::from(state) * words.len() as u64 * 4;
            self.honest.download(stream, states, at, bytemuck::cast_slice_mut(&mut words))?;
            words.chunks_exact_mut(head).for_each(&change);
            self.honest.upload(stream, states, at, bytemuck::cast_slice(&words))?;
        }
        Ok(())
    }

    /// The view with its f32 elements cut to 16 bits of a bf16.
    fn truncated(&self, stream: &mut B::Stream, view: &View<B::Buffer>) -> Result<View<B::Buffer>> {
        if view.dtype != Dtype::F32 {
            return Ok(view.clone());
        }
        let mut bytes = vec![0; view.buffer.bytes() as usize];
        self.honest.download(stream, &view.buffer, 0, &mut bytes)?;
        bytes.chunks_exact_mut(4).for_each(|word| word[..2].fill(0));
        let buffer = self.honest.alloc("truncated", view.buffer.bytes())?;
        self.honest.upload(stream, &buffer, 0, &bytes)?;
        Ok(View { buffer, ..view.clone() })
    }

    /// The channels of quantised keys.
    fn channels<'a>(&self, given: Option<Channels<'a, B::Buffer>>) -> Option<Channels<'a, B::Buffer>> {
        given.map(|channels| if self.is(ForgetsTheOffset) { Channels { offset: 0, ..channels } } else { channels })
    }

    fn matrices<'a>(&self, basis: &Matrices<'a, B::Buffer>) -> Matrices<'a, B::Buffer> {
        match self.fault {
            OneMatrixForAllHeads => Matrices { head_stride: 0, ..*basis },
            ForgetsTheOffset => Matrices { offset: 0, ..*basis },
            _ => *basis,
        }
    }

    /// Changes the log-sum-exps after a merge.
    fn relog(&self, stream: &mut B::Stream, args: &Merge<'_, B::Buffer>, f: fn(f32) -> f32) -> Result<()> {
        let Some(lse) = args.lse else { return Ok(()) };
        for row in 0..args.rows.len() as u64 {
            for head in 0..u64::from(args.q_heads) {
                let at = lse.offset + 4 * (row * lse.strides[0] + head * lse.strides[1]);
                let mut word = [0; 4];
                self.honest.download(stream, &lse.buffer, at, &mut word)?;
                let changed = f(f32::from_le_bytes(word));
                self.honest.upload(stream, &lse.buffer, at, &changed.to_le_bytes())?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> Backend for Saboteur<B> {
    type Buffer = B::Buffer;
    type Stream = B::Stream;
    type Event = B::Event;
    type Host = B::Host;

    fn caps(&self) -> &Caps {
        self.honest.caps()
    }

    fn alloc(&self, label: &str, bytes: u64) -> Result<B::Buffer> {
        self.honest.alloc(label, if self.is(SizesWrapAround) { bytes & 0xf_ffff } else { bytes })
    }

    fn stream(&self) -> Result<B::Stream> {
        self.honest.stream()
    }

    fn upload(&self, stream: &mut B::Stream, dst: &B::Buffer, offset: u64, data: &[u8]) -> Result<()> {
        if self.is(UploadsLostNowAndThen) && data.len() <= 16 && self.calls.fetch_add(1, Relaxed) % 50 == 49 {
            return Ok(());
        }
        let offset = if self.is(MisalignedOffsetsRoundedDown) { offset / 4 * 4 } else { offset };
        let mut data = data.to_vec();
        if self.is(UploadsRoundedUp) && offset + data.len() as u64 + 4 <= dst.bytes() {
            data.resize(data.len().next_multiple_of(8), 0);
        }
        self.honest.upload(stream, dst, offset, &data)
    }

    fn download(&self, stream: &mut B::Stream, src: &B::Buffer, offset: u64, out: &mut [u8]) -> Result<()> {
        self.honest.download(stream, src, offset, out)
    }

    fn copy(&self, s: &mut B::Stream, src: (&B::Buffer, u64), dst: (&B::Buffer, u64), bytes: u64) -> Result<()> {
        self.honest.copy(s, src, dst, if self.is(CopiesOneWordLess) { bytes.saturating_sub(4) } else { bytes })
    }

    fn fill(&self, stream: &mut B::Stream, dst: &B::Buffer, offset: u64, bytes: u64, word: u32) -> Result<()> {
        let more = self.is(FillsOneWordMore) && offset + bytes + 4 <= dst.bytes();
        self.honest.fill(stream, dst, offset, if more { bytes + 4 } else { bytes }, word)
    }

    fn sum(&self, stream: &mut B::Stream, src: &B::Buffer, bytes: u64, total: &B::Buffer) -> Result<()> {
        self.honest.sum(stream, src, bytes, total)
    }

    fn record(&self, stream: &mut B::Stream) -> Result<B::Event> {
        self.honest.record(stream)
    }

    fn wait(&self, stream: &mut B::Stream, event: &B::Event) -> Result<()> {
        self.honest.wait(stream, event)
    }

    fn is_done(&self, event: &B::Event) -> Result<bool> {
        self.honest.is_done(event)
    }

    fn finish(&self, event: &B::Event) -> Result<()> {
        self.honest.finish(event)
    }

    fn prepare(&self, record: &Record, slabs: usize) {
        self.honest.prepare(record, slabs);
    }

    fn time(&self, stream: &mut B::Stream) -> Result<()> {
        self.honest.time(stream)
    }

    fn elapsed(&self, from: &B::Event, to: &B::Event) -> Result<Option<Duration>> {
        self.honest.elapsed(from, to)
    }

    fn alloc_host(&self, label: &str, bytes: u64, usage: HostUse) -> Result<B::Host> {
        match self.fault {
            LacksHostMemory(from, to) if (from..to).contains(&self.calls.fetch_add(1, Relaxed)) => {
                Err(Error::OutOfMemory { backend: "saboteur", bytes, purpose: format!("host memory: {label}") })
            }
            _ => self.honest.alloc_host(label, bytes, usage),
        }
    }

    fn read_host(&self, host: &B::Host, offset: u64, out: &mut [u8]) -> Result<()> {
        self.honest.read_host(host, offset, out)
    }

    fn write_host(&self, host: &B::Host, offset: u64, data: &[u8]) -> Result<()> {
        self.honest.write_host(host, offset, data)
    }

    fn swap_out(&self, stream: &mut B::Stream, args: &Swap<'_, B::Buffer, B::Host>) -> Result<()> {
        let (mut moves, slabs) = (self.swapped(args.moves), self.slabs(&args.arena));
        if self.is(LosesTheLastPageOut) {
            moves.pop();
        }
        if self.is(KeepsOldRecords) {
            let mut written = self.written.lock().expect("no thread panics with it");
            moves.retain(|one| written.insert(one.to));
        }
        let offset = if self.is(IgnoresTheHostOffset) { 0 } else { args.offset };
        let arena = Arena { slabs: &slabs, ..args.arena };
        self.honest.swap_out(stream, &Swap { arena, offset, moves: &moves, ..*args })?;
        for one in moves.iter().filter(|_| self.is(WritesBehindTheRecord)) {
            let end = args.host_offset(one.to) + args.record.bytes();
            if end + 4 <= args.host.bytes() {
                self.honest.write_host(args.host, end, &[0; 4])?;
            }
        }
        Ok(())
    }

    fn swap_in(&self, stream: &mut B::Stream, args: &Swap<'_, B::Buffer, B::Host>) -> Result<()> {
        let (mut moves, slabs) = (self.swapped(args.moves), self.slabs(&args.arena));
        if self.is(LosesTheLastPageIn) {
            moves.pop();
        }
        if self.is(TakesTheNeighboursPage) {
            moves.iter_mut().for_each(|one| one.from ^= 1);
        }
        let arena = Arena { slabs: &slabs, ..args.arena };
        self.honest.swap_in(stream, &Swap { arena, moves: &moves, ..*args })
    }

    fn flush(&self, stream: &mut B::Stream) -> Result<()> {
        self.honest.flush(stream)
    }

    fn synchronize(&self, stream: &mut B::Stream) -> Result<()> {
        self.honest.synchronize(stream)
    }

    fn append(&self, stream: &mut B::Stream, args: &Append<'_, B::Buffer>) -> Result<()> {
        let (mut k, mut v) = (args.k.clone(), args.v.clone());
        let geometry = args.record.geometry();
        if self.is(SwapsKAndV) && geometry.k_dim() == geometry.v_dim() {
            std::mem::swap(&mut k, &mut v);
        }
        if self.is(RoundsByTruncation) && args.record.format() == PageFormat::Bf16 {
            (k, v) = (self.truncated(stream, &k)?, self.truncated(stream, &v)?);
        }
        let mut runs = self.grid(args.runs);
        for run in &mut runs {
            if self.is(LosesTheLastToken) && run.tokens > 1 {
                run.tokens -= 1;
            }
            if self.is(WritesTheNextSlot) && run.slot + run.tokens < geometry.page_tokens() {
                run.slot += 1;
            }
        }
        let scratch = self.honest.alloc("a counter", 4)?;
        let args = Append {
            arena: Arena { slabs: &self.slabs(&args.arena), ..args.arena },
            channels: self.channels(args.channels),
            k: &k,
            v: &v,
            runs: &runs,
            non_finite: if self.is(CountsNothing) { &scratch } else { args.non_finite },
            write: args.write || self.is(WritesWhenToldNotTo),
            ..*args
        };
        self.honest.append(stream, &args)
    }

    fn transfer(&self, stream: &mut B::Stream, args: &Transfer<'_, B::Buffer>) -> Result<()> {
        use crate::backend::ops::Place;
        let mut moves = self.grid(args.moves);
        if self.is(LosesTheLastMove) {
            moves.pop();
        }
        if let (true, [first, second, ..]) = (self.is(SwapsTwoMoves), &mut moves[..]) {
            std::mem::swap(&mut first.to, &mut second.to);
        }
        let slabs = [&args.from, &args.to].map(|place| match place {
            Place::Frames(arena) => self.slabs(arena),
            Place::Records { .. } => Vec::new(),
        });
        let [from, to] = [(&args.from, &slabs[0]), (&args.to, &slabs[1])].map(|(place, slabs)| match *place {
            Place::Frames(arena) => Place::Frames(Arena { slabs, ..arena }),
            Place::Records { buffer, offset, stride } => Place::Records { buffer, offset, stride },
        });
        self.honest.transfer(stream, &Transfer { record: args.record, from, to, moves: &moves })
    }

    fn attend(&self, stream: &mut B::Stream, args: &Attend<'_, B::Buffer>) -> Result<()> {
        let tokens = args.grain.tokens();
        let change = |row: &Row| match self.fault {
            DropsTheLastToken if row.end > row.start + 1 => Row { end: row.end - 1, ..*row },
            ReadsPastTheEnd if row.end > row.start => Row { end: row.end + 1, ..*row },
            IgnoresTheWindow if row.end > row.start => Row { start: row.start / tokens * tokens, ..*row },
            SplitsWrongly if row.end > row.start + tokens => Row { start: row.start + 1, ..*row },
            _ => *row,
        };
        let rows: Vec<Row> = args.rows.iter().map(change).collect();
        let nudged = match self.fault {
            DependsOnTheBatch => args.tiles.len() > 3,
            DependsOnTheSlabs => args.arena.slabs.len() > 3,
            DependsOnTheTime => self.calls.fetch_add(1, Relaxed) % 17 == 16,
            _ => false,
        };
        let mut scale = args.scale;
        if self.is(ScalesWrongly) && scale.is_finite() {
            scale *= 1.0001;
        }
        if nudged && scale.is_finite() {
            scale = f32::from_bits(scale.to_bits() + 4);
        }
        let mut q = args.q.clone();
        if self.is(AsksOneQueryForAllHeads) {
            q.strides[1] = 0;
        }
        let args = Attend {
            arena: Arena { slabs: &self.slabs(&args.arena), ..args.arena },
            channels: self.channels(args.channels),
            q: &q,
            rows: &rows,
            tiles: &self.grid(args.tiles),
            scale,
            ..*args
        };
        self.honest.attend(stream, &args)?;
        let states = rows.iter().flat_map(|row| row.state..row.state + args.grain.states(row.start, row.end));
        let (geometry, lost) = (args.record.geometry(), states.filter(|_| self.is(LosesWhatScoresLack)));
        let (heads, dim) = (geometry.q_heads(), geometry.v_dim());
        self.change(stream, args.states, (heads, dim), lost, |words| words[dim as usize + 2] = 0)
    }

    fn merge(&self, stream: &mut B::Stream, args: &Merge<'_, B::Buffer>) -> Result<()> {
        let mut rows = self.grid(args.rows);
        if self.is(DropsTheLastState) {
            rows.iter_mut().filter(|row| row.states > 1).for_each(|row| row.states -= 1);
        }
        if self.is(LeavesEmptyRows) && rows.last().is_some_and(|row| row.states == 0) {
            rows.pop();
        }
        self.honest.merge(stream, &Merge { rows: &rows, ..*args })?;
        match self.fault {
            LogsInBase2 => self.relog(stream, args, |lse| lse * std::f32::consts::LOG2_E),
            FiniteMinusInfinity => self.relog(stream, args, |lse| lse.max(-1e30)),
            _ => Ok(()),
        }
    }

    fn fold(&self, stream: &mut B::Stream, args: &Fold<'_, B::Buffer>) -> Result<()> {
        let mut rows = self.grid(args.rows);
        if self.is(FoldsOneStateLess) {
            rows.iter_mut().filter(|row| row.states > 1).for_each(|row| row.states -= 1);
        }
        rows.retain(|row| !(self.is(FoldsElsewhereOnly) && row.to == row.state));
        rows.retain(|row| !(self.is(FoldsNothingToNothing) && row.states == 0));
        self.honest.fold(stream, &Fold { rows: &rows, ..*args })?;
        let (shape, dim) = ((args.q_heads, args.v_dim), args.v_dim as usize);
        let folded = rows.iter().map(|row| row.to);
        match self.fault {
            // As a sum that starts at zero does.
            LosesTheSignOfZero => self.change(stream, args.states, shape, folded, |words| {
                words.iter_mut().for_each(|word| *word = (f32::from_bits(*word) + 0.0).to_bits());
            }),
            LosesWhatScoresLack => self.change(stream, args.states, shape, folded, |words| words[dim + 2] = 0),
            _ => Ok(()),
        }
    }

    fn project(&self, stream: &mut B::Stream, args: &Project<'_, B::Buffer>) -> Result<()> {
        let mut runs = self.grid(args.runs);
        for run in &mut runs {
            if self.is(LosesTheLastToken) && run.tokens > 1 {
                run.tokens -= 1;
            }
            if self.is(WritesTheNextSlot) && run.slot + run.tokens < args.record.geometry().page_tokens() {
                run.slot += 1;
            }
            if self.is(ProjectsTheNextSlot) && run.slot + run.tokens < args.record.geometry().page_tokens() {
                run.tokens += 1;
            }
        }
        let slabs = [&args.arena, &args.projections].map(|arena| self.slabs(arena));
        let args = Project {
            arena: Arena { slabs: &slabs[0], ..args.arena },
            projections: Arena { slabs: &slabs[1], ..args.projections },
            channels: self.channels(args.channels),
            basis: self.matrices(&args.basis),
            runs: &runs,
            ..*args
        };
        self.honest.project(stream, &args)
    }

    fn score(&self, stream: &mut B::Stream, args: &Score<'_, B::Buffer>) -> Result<()> {
        let change = |entry: &ScoreEntry| match self.fault {
            ScoresOneTokenLess => ScoreEntry { tokens: entry.tokens.saturating_sub(1), ..*entry },
            ScoresOneTokenMore if entry.tokens < args.geometry.page_tokens() => {
                ScoreEntry { tokens: entry.tokens + 1, ..*entry }
            }
            ScoresTheFirstRow => ScoreEntry { row: 0, ..*entry },
            _ => *entry,
        };
        let entries: Vec<ScoreEntry> = args.entries.iter().map(change).collect();
        let mut q = args.q.clone();
        if self.is(AsksOneQueryForAllHeads) {
            q.strides[1] = 0;
        }
        let args = Score {
            projections: Arena { slabs: &self.slabs(&args.projections), ..args.projections },
            q: &q,
            basis: self.matrices(&args.basis),
            entries: &self.grid(&entries),
            ..*args
        };
        self.honest.score(stream, &args)
    }
}
