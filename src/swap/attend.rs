//! `attend` over pages that may be anywhere: resident splits at once, the others as their tiles come.

use super::HighSpeedSwap;
use super::plan::{Need, Piece, Span, TileSize, pages_of, pieces, tiles};
use crate::Result;
use crate::attention::{Batch, SPLIT};
use crate::backend::Backend;
use crate::store::Query;
use std::collections::{HashMap, VecDeque};

/// The sequences of one batch: what each needs, and which table is whose.
#[derive(Debug, Default)]
struct Cast {
    ids: Vec<u64>,
    needs: Vec<Need>,
    by_table: HashMap<u32, usize>,
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Attends query rows over a layer's pages, as [`PagedStore::attend`](crate::PagedStore::attend) does, wherever the pages
    /// are: to the last bit the answer of a store that holds them all on the device.
    ///
    /// # Errors
    /// Those of `PagedStore::attend`; [`Error::Page`](crate::Error::Page) when a page does not come back, naming it, and
    /// [`Error::NothingEvictable`](crate::Error::NothingEvictable) when a split does not fit beside what is pinned. The
    /// outputs are unspecified then, the sequences as they were.
    pub fn attend(&mut self, layer: usize, query: &Query<'_, B::Buffer>) -> Result<()> {
        self.pump()?;
        let rows = self.store.check_query(layer, query)?;
        let _span = tracing::trace_span!("kvtide.attend", layer, rows).entered();
        if self.last_layer.is_none_or(|last| layer <= last) {
            self.step += 1;
        }
        self.last_layer = Some(layer);
        self.meter.begin_attend();
        for rows in query.rows {
            let layers = self.store.sequences.get_mut(&rows.seq.id());
            let pages = &mut layers.expect("check_query looked it up")[layer];
            self.store.pool.place_table(pages)?;
        }
        for batch in self.store.batches(layer, query) {
            let cast = self.cast(layer, query, &batch);
            self.attend_batch(layer, query, &batch, &cast)?;
        }
        self.set_mark()?;
        self.store.counters.attended_rows += rows;
        if self.config.layer_ahead {
            self.fetch_ahead(layer, query);
        }
        Ok(())
    }

    /// Which sequences a batch reads, and which of their splits.
    fn cast(&self, layer: usize, query: &Query<'_, B::Buffer>, batch: &Batch) -> Cast {
        let mut cast = Cast::default();
        let mut ids: HashMap<u32, u64> = HashMap::new();
        for rows in query.rows {
            if let Some(span) = self.store.sequences[&rows.seq.id()][layer].span {
                ids.insert(span.base, rows.seq.id());
            }
        }
        for tile in &batch.tiles {
            let id = ids[&tile.table];
            let sequence = *cast.by_table.entry(tile.table).or_insert_with(|| {
                cast.ids.push(id);
                let pages = self.table(id, layer).len() as u32;
                cast.needs.push(Need { splits: tile.split..tile.split, pages });
                cast.ids.len() - 1
            });
            let splits = &mut cast.needs[sequence].splits;
            *splits = splits.start.min(tile.split)..splits.end.max(tile.split + tile.splits);
        }
        cast
    }

    fn attend_batch(&mut self, layer: usize, query: &Query<'_, B::Buffer>, batch: &Batch, cast: &Cast) -> Result<()> {
        let number = |sequence: usize, page: u32| self.table(cast.ids[sequence], layer)[page as usize];
        let missing = |sequence: usize, page: u32| !self.resident().is_resident(number(sequence, page));
        let (resident, streamed) = pieces(&cast.needs, self.geometry().page_tokens(), self.tile_size(), missing);
        let pieces = std::iter::once(resident).chain(streamed).collect();
        let mut held = VecDeque::new();
        let result = self.attend_in_turn(layer, query, batch, cast, pieces, &mut held);
        held.into_iter().flatten().for_each(|page| self.residency().unpin(page));
        result?;
        self.store.enqueue_merge(query, batch)
    }

    /// Attends the pieces in turn, each asked for ahead of its turn. `held` are the pages of those asked for and not yet
    /// attended: they are pinned. What a later piece needs may go meanwhile and come back, so that a split always fits.
    fn attend_in_turn(
        &mut self,
        layer: usize,
        query: &Query<'_, B::Buffer>,
        batch: &Batch,
        cast: &Cast,
        mut pieces: VecDeque<Piece>,
        held: &mut VecDeque<Vec<u32>>,
    ) -> Result<()> {
        let ahead = self.config.tiles_ahead as usize;
        let mut is_first = true;
        while !pieces.is_empty() {
            while held.len() <= ahead && held.len() < pieces.len() {
                let lacking = self.ask_ahead(layer, cast, &pieces[held.len()], held)?;
                if lacking == 0 {
                    continue;
                }
                if !held.is_empty() {
                    break;
                }
                // Nothing else is under way: it comes split by split, or not at all.
                let splits = pieces[0].splits();
                if splits.len() == 1 {
                    return Err(self.no_room(lacking));
                }
                pieces.pop_front();
                splits.into_iter().rev().for_each(|split| pieces.push_front(split));
            }
            let Some(piece) = pieces.pop_front() else { break };
            self.land_piece(layer, cast, &piece)?;
            self.attend_piece(layer, query, batch, cast, &piece.spans)?;
            if !std::mem::take(&mut is_first) {
                self.set_mark()?;
            }
            let keep = self.policy.keeps_streamed();
            for page in held.pop_front().into_iter().flatten() {
                self.residency().unpin(page);
                if keep { self.residency().stay(page) } else { self.residency().streamed(page) }
            }
        }
        Ok(())
    }

    /// Begins to fetch what a piece lacks and holds its pages; returns the frames needed where there is no room for that.
    fn ask_ahead(&mut self, layer: usize, cast: &Cast, piece: &Piece, held: &mut VecDeque<Vec<u32>>) -> Result<u64> {
        let pages = self.pages_of_piece(layer, cast, piece);
        pages.iter().for_each(|&page| self.residency().pin(page));
        let misses = pages.iter().filter(|&&page| !self.resident().is_resident(page)).count();
        let answer = self.try_fetch(&pages);
        if matches!(answer, Ok(0)) {
            self.meter.met(pages.len() as u64, misses as u64);
            held.push_back(pages);
        } else {
            pages.into_iter().for_each(|page| self.residency().unpin(page));
        }
        answer
    }

    fn land_piece(&mut self, layer: usize, cast: &Cast, piece: &Piece) -> Result<()> {
        let page_size = self.geometry().page_tokens();
        for span in &piece.spans {
            let (id, count) = (cast.ids[span.sequence], cast.needs[span.sequence].pages);
            let table = self.table(id, layer);
            let pages: Vec<(u32, u64)> =
                page_range(span, page_size, count).map(|page| (table[page as usize], u64::from(page))).collect();
            self.land(&pages, id, layer)?;
        }
        Ok(())
    }

    /// Tells the device where the pages of some splits are, and attends them.
    fn attend_piece(
        &mut self,
        layer: usize,
        query: &Query<'_, B::Buffer>,
        batch: &Batch,
        cast: &Cast,
        spans: &[Span],
    ) -> Result<()> {
        let page_size = self.geometry().page_tokens();
        let (mark, step) = (self.marks.next(), self.step);
        for (sequence, &id) in cast.ids.iter().enumerate() {
            let pool = &mut self.store.pool;
            let layers = self.store.sequences.get_mut(&id);
            let pages = &mut layers.expect("check_query looked it up")[layer];
            pages.known.resize(pages.table.len().max(pages.known.len()), 0);
            let of = spans.iter().filter(|span| span.sequence == sequence);
            for page in of.flat_map(|span| page_range(span, page_size, cast.needs[sequence].pages)) {
                let number = pages.table[page as usize];
                let residency = pool.residency.as_mut().expect("made by the builder");
                residency.used(number, mark, step);
                let frame = residency.frame(number);
                if pages.known[page as usize] != frame {
                    pages.known[page as usize] = frame;
                    pages.touch(page as usize);
                }
            }
            pool.upload_table(pages)?;
        }
        let cut = tiles(batch, spans, |tile| cast.by_table[&tile.table]);
        self.store.enqueue_attend(query, batch, &cut)
    }

    /// The page numbers of a piece, the missing and the resident ones.
    fn pages_of_piece(&self, layer: usize, cast: &Cast, piece: &Piece) -> Vec<u32> {
        let page_size = self.geometry().page_tokens();
        let pages = piece.spans.iter().flat_map(|span| {
            let table = self.table(cast.ids[span.sequence], layer);
            page_range(span, page_size, table.len() as u32).map(|page| table[page as usize])
        });
        let mut pages: Vec<u32> = pages.collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// Bounds of a tile: what is configured, but no more than lets all tiles under way fit beside each other.
    fn tile_size(&self) -> TileSize {
        let share = (self.resident().limit / (2 + u64::from(self.config.tiles_ahead))).clamp(1, u32::MAX.into()) as u32;
        TileSize { missing: self.config.tile_pages.min(share), pages: share }
    }

    /// Begins to fetch the first tiles that the next layer will want. What cannot be fetched now is fetched when wanted.
    fn fetch_ahead(&mut self, layer: usize, query: &Query<'_, B::Buffer>) {
        let next = (layer + 1) % self.geometry().layers() as usize;
        let page_size = self.geometry().page_tokens();
        let mut ids: Vec<u64> = query.rows.iter().map(|rows| rows.seq.id()).collect();
        ids.dedup();
        let needs: Vec<Need> = ids
            .iter()
            .map(|id| {
                let pages = &self.store.sequences[id][next];
                Need { splits: 0..pages.len.div_ceil(SPLIT.into()) as u32, pages: pages.table.len() as u32 }
            })
            .collect();
        let missing =
            |sequence: usize, page: u32| !self.resident().is_resident(self.table(ids[sequence], next)[page as usize]);
        let (_, streamed) = pieces(&needs, page_size, self.tile_size(), missing);
        for piece in streamed.iter().take(self.config.tiles_ahead as usize) {
            let numbers: Vec<u32> =
                piece.missing.iter().map(|&(s, page)| self.table(ids[s], next)[page as usize]).collect();
            let free = self.resident().free_soon();
            if free < numbers.len() as u64 || self.fetch(&numbers).is_err() {
                break;
            }
        }
    }
}

fn page_range(span: &Span, page_size: u32, pages: u32) -> std::ops::Range<u32> {
    pages_of(span.splits.start, page_size, pages).start..pages_of(span.splits.end - 1, page_size, pages).end
}
