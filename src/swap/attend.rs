//! `attend` over pages that may be anywhere: resident splits at once, the others as their tiles come.

use super::HighSpeedSwap;
use super::fetch::Wanted;
use super::plan::{Need, Piece, Span, TileSize, pages_of, pieces, tiles};
use crate::Result;
use crate::attention::{Batch, Grain, SPLIT};
use crate::backend::Backend;
use crate::store::Query;
use std::collections::{HashMap, VecDeque};

/// The sequences of one batch: what each needs, and which table is whose.
#[derive(Debug, Default)]
pub(super) struct Cast {
    pub(super) ids: Vec<u64>,
    pub(super) needs: Vec<Need>,
    pub(super) by_table: HashMap<u32, usize>,
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
            self.take_scores()?;
        }
        self.last_layer = Some(layer);
        self.meter.begin_attend();
        for rows in query.rows {
            let layers = self.store.sequences.get_mut(&rows.seq.id());
            let pages = &mut layers.expect("check_query looked it up")[layer];
            self.store.pool.place_table(pages)?;
        }
        let visible = self.store.visible(layer, query);
        let missing = self.is_anything_missing(layer, query);
        // Sections may be longer than what fits beside what is pinned.
        let batches = if missing {
            self.store.batches_of(&visible, Grain::Split)
        } else {
            self.store.batches(&visible, query.q().dtype)
        };
        // Rows of one sequence in several batches would stream its pages once for each of them.
        let again = batches.windows(2).any(|pair| {
            pair[1].tiles.first().is_some_and(|tile| pair[0].tiles.last().is_some_and(|last| last.table == tile.table))
        });
        if again && missing {
            self.attend_in_order(layer, query, &visible)?;
        } else {
            for batch in batches {
                let cast = self.cast(layer, query, &batch);
                self.attend_batch(layer, query, &batch, &cast)?;
            }
        }
        self.score(layer, query)?;
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
        let each = batch.grain.splits();
        for tile in &batch.tiles {
            let id = ids[&tile.table];
            let sequence = *cast.by_table.entry(tile.table).or_insert_with(|| {
                cast.ids.push(id);
                let pages = self.table(id, layer).len() as u32;
                cast.needs.push(Need { splits: tile.split * each..tile.split * each, pages });
                cast.ids.len() - 1
            });
            let Need { splits, pages } = &mut cast.needs[sequence];
            let end = ((tile.split + tile.splits) * each).min(pages.div_ceil(SPLIT / self.geometry().page_tokens()));
            *splits = splits.start.min(tile.split * each)..splits.end.max(end);
        }
        cast
    }

    fn attend_batch(&mut self, layer: usize, query: &Query<'_, B::Buffer>, batch: &Batch, cast: &Cast) -> Result<()> {
        let number = |sequence: usize, page: u32| self.table(cast.ids[sequence], layer)[page as usize];
        let missing = |sequence: usize, page: u32| !self.resident().is_resident(number(sequence, page));
        let (page_size, each) = (self.geometry().page_tokens(), batch.grain.splits());
        let (resident, streamed) = pieces(&cast.needs, page_size, each, self.tile_size(), missing);
        let streamed = self.by_score(layer, cast, streamed);
        let pieces = std::iter::once(resident).chain(streamed).collect();
        self.in_turn(layer, cast, pieces, each, |swap, piece| {
            swap.attend_piece(layer, query, batch, cast, &piece.spans)
        })?;
        self.store.enqueue_merge(query, batch)
    }

    /// Lets `attend` enqueue what works on the pages of one piece after the other. Each is asked for ahead of its turn; its
    /// pages are pinned from then until it has been attended. What a later piece needs may go meanwhile and come back, so that
    /// a split always fits. A piece that does not fit comes in parts of `each` splits.
    pub(super) fn in_turn(
        &mut self,
        layer: usize,
        cast: &Cast,
        mut pieces: VecDeque<Piece>,
        each: u32,
        mut attend: impl FnMut(&mut Self, &Piece) -> Result<()>,
    ) -> Result<()> {
        let mut asked: VecDeque<Vec<Wanted>> = VecDeque::new();
        let mut result = Ok(());
        while result.is_ok() && !pieces.is_empty() {
            result = self.next_in_turn(layer, cast, &mut pieces, each, &mut asked, &mut attend);
        }
        asked.iter().for_each(|pages| self.let_go(pages));
        result
    }

    fn next_in_turn(
        &mut self,
        layer: usize,
        cast: &Cast,
        pieces: &mut VecDeque<Piece>,
        each: u32,
        asked: &mut VecDeque<Vec<Wanted>>,
        attend: &mut impl FnMut(&mut Self, &Piece) -> Result<()>,
    ) -> Result<()> {
        let ahead = self.tiles_ahead() as usize;
        while asked.len() <= ahead && asked.len() < pieces.len() {
            let pages = self.pages_of_piece(layer, cast, &pieces[asked.len()]);
            let misses = pages.iter().filter(|page| !self.resident().is_resident(page.number)).count();
            let lacking = self.try_ask(&pages)?;
            if lacking == 0 {
                self.meter.met(pages.len() as u64, misses as u64);
                asked.push_back(pages);
                continue;
            }
            if !asked.is_empty() {
                break;
            }
            // Nothing else is under way: it comes part by part, or not at all.
            let parts = pieces[0].parts(each);
            if parts.len() == 1 {
                return Err(self.no_room(lacking));
            }
            pieces.pop_front();
            parts.into_iter().rev().for_each(|part| pieces.push_front(part));
        }
        let (Some(piece), Some(pages)) = (pieces.pop_front(), asked.front()) else { return Ok(()) };
        self.land(layer, pages)?;
        attend(self, &piece)?;
        if !pages.is_empty() {
            self.set_mark()?;
        }
        let keep = self.policy.keeps_streamed();
        for page in asked.pop_front().into_iter().flatten() {
            self.residency().unpin(page.number);
            if keep { self.residency().stay(page.number) } else { self.residency().streamed(page.number) }
        }
        Ok(())
    }

    /// Tiles in the order in which they are fetched: where pages are scored, the tile with the best page first. (Each split
    /// has its own states, so the order changes no bit.)
    fn by_score(&self, layer: usize, cast: &Cast, mut tiles: Vec<Piece>) -> Vec<Piece> {
        if self.policy.wants_scores() {
            let best = |tile: &Piece| {
                let pages = self.pages_of_piece(layer, cast, tile).into_iter();
                pages.map(|page| self.resident().score(page.number)).fold(f32::NEG_INFINITY, f32::max)
            };
            tiles.sort_by_cached_key(|tile| std::cmp::Reverse(ordered(best(tile))));
        }
        tiles
    }

    /// Whether a page of the call's sequences is not on the device.
    fn is_anything_missing(&self, layer: usize, query: &Query<'_, B::Buffer>) -> bool {
        let mut pages = query.rows.iter().flat_map(|rows| self.table(rows.seq.id(), layer));
        pages.any(|&page| !self.resident().is_resident(page))
    }

    /// Tells the device where the pages of some splits are, and attends them.
    pub(super) fn attend_piece(
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
        self.store.enqueue_attend(layer, query, batch, &cut)
    }

    /// The pages of a piece, those on the device too.
    pub(super) fn pages_of_piece(&self, layer: usize, cast: &Cast, piece: &Piece) -> Vec<Wanted> {
        let page_size = self.geometry().page_tokens();
        let pages = piece.spans.iter().flat_map(|span| {
            let sequence = cast.ids[span.sequence];
            let table = self.table(sequence, layer);
            let pages = page_range(span, page_size, table.len() as u32);
            pages.map(move |page| Wanted { number: table[page as usize], sequence, page: page.into() })
        });
        pages.collect()
    }

    /// Tiles under way while one is attended.
    fn tiles_ahead(&self) -> u32 {
        self.config.tiles_ahead.unwrap_or_else(|| self.tier.tiles_ahead())
    }

    /// Bounds of a tile: what is configured, but no more than lets all tiles under way fit beside each other.
    pub(super) fn tile_size(&self) -> TileSize {
        let share = (self.resident().limit / (2 + u64::from(self.tiles_ahead()))).clamp(1, u32::MAX.into()) as u32;
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
        let (_, streamed) = pieces(&needs, page_size, 1, self.tile_size(), missing);
        let cast = Cast { ids, needs, ..Cast::default() };
        let streamed = self.by_score(next, &cast, streamed);
        for piece in streamed.iter().take(self.tiles_ahead() as usize) {
            let pages = self.pages_of_piece(next, &cast, piece);
            let numbers: Vec<u32> = pages.iter().map(|page| page.number).collect();
            if self.resident().free_soon() < piece.missing as u64 || !matches!(self.fetch(&numbers), Ok(0)) {
                break;
            }
        }
    }
}

/// A number's bits as an integer of the same order.
fn ordered(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    if bits < 0 { bits ^ i32::MAX } else { bits }
}

fn page_range(span: &Span, page_size: u32, pages: u32) -> std::ops::Range<u32> {
    pages_of(&span.splits, page_size, pages)
}
