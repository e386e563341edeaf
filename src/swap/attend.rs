//! `attend` over pages that may be anywhere: resident splits at once, the others as their tiles come.

use super::HighSpeedSwap;
use super::fetch::Wanted;
use super::plan::{Need, Piece, Span, pages_of, pieces, tiles};
use crate::Result;
use crate::attention::{Batch, SPLIT};
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
        let batches = self.store.batches(&visible);
        // Rows of one sequence in several batches would stream its pages once for each of them.
        let again = batches.windows(2).any(|pair| {
            pair[1].tiles.first().is_some_and(|tile| pair[0].tiles.last().is_some_and(|last| last.table == tile.table))
        });
        if again && self.is_anything_missing(layer, query) {
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
        let (page_size, tile_pages) = (self.geometry().page_tokens(), self.tile_pages());
        let number = |sequence: usize, page: u32| self.table(cast.ids[sequence], layer)[page as usize];
        let missing = |sequence: usize, page: u32| !self.resident().is_resident(number(sequence, page));
        let (resident, streamed) = pieces(&cast.needs, page_size, tile_pages, missing);
        let pages: u64 = cast.needs.iter().map(|need| page_count(need, page_size)).sum();
        let misses: usize = streamed.iter().map(|piece| piece.missing).sum();
        self.meter.met(pages, misses as u64);
        let attend = |swap: &mut Self, piece: &Piece| swap.attend_piece(layer, query, batch, cast, &piece.spans);
        self.in_turn(layer, cast, Some(&resident), &streamed, attend)?;
        self.store.enqueue_merge(query, batch)
    }

    /// Lets `attend` enqueue what works on the pages of one piece after the other: first on a piece that is on the device,
    /// then on the tiles, each read ahead of its turn.
    pub(super) fn in_turn(
        &mut self,
        layer: usize,
        cast: &Cast,
        resident: Option<&Piece>,
        tiles: &[Piece],
        mut attend: impl FnMut(&mut Self, &Piece) -> Result<()>,
    ) -> Result<()> {
        let mut asked: VecDeque<Vec<Wanted>> = VecDeque::new();
        let result = (|| {
            if let Some(piece) = resident {
                // The first tiles travel meanwhile, but not into these frames.
                let here = self.pages_of_piece(layer, cast, piece);
                here.iter().for_each(|page| self.residency().pin(page.number));
                let result = self.read_ahead(layer, cast, tiles, &mut asked).and_then(|()| attend(self, piece));
                self.let_go(&here);
                result?;
            }
            for (at, tile) in tiles.iter().enumerate() {
                if asked.is_empty() {
                    let pages = self.pages_of_piece(layer, cast, tile);
                    self.ask(&pages, true)?;
                    asked.push_back(pages);
                }
                self.land(layer, &asked[0])?;
                attend(self, tile)?;
                self.set_mark()?;
                let keep = self.policy.keeps_streamed();
                for page in asked.pop_front().into_iter().flatten() {
                    self.residency().unpin(page.number);
                    if keep { self.residency().stay(page.number) } else { self.residency().streamed(page.number) }
                }
                self.read_ahead(layer, cast, &tiles[at + 1..], &mut asked)?;
            }
            Ok(())
        })();
        asked.iter().for_each(|pages| self.let_go(pages));
        result
    }

    /// Asks for the tiles that should be under way and are not; those that find no room now are asked for later.
    fn read_ahead(
        &mut self,
        layer: usize,
        cast: &Cast,
        tiles: &[Piece],
        asked: &mut VecDeque<Vec<Wanted>>,
    ) -> Result<()> {
        let ahead = (self.config.tiles_ahead as usize).min(tiles.len());
        while asked.len() < ahead {
            let pages = self.pages_of_piece(layer, cast, &tiles[asked.len()]);
            if !self.ask(&pages, false)? {
                break;
            }
            asked.push_back(pages);
        }
        Ok(())
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
        self.store.enqueue_attend(query, batch, &cut)
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

    /// Pages of a tile: what is configured, but no more than lets all tiles under way fit beside each other.
    pub(super) fn tile_pages(&self) -> u32 {
        let share = self.resident().limit / (2 + u64::from(self.config.tiles_ahead));
        u64::from(self.config.tile_pages).min(share).max(1) as u32
    }

    /// Begins to fetch the first tiles that the next layer will want. What cannot be fetched now is fetched when wanted.
    fn fetch_ahead(&mut self, layer: usize, query: &Query<'_, B::Buffer>) {
        let next = (layer + 1) % self.geometry().layers() as usize;
        let (page_size, tile_pages) = (self.geometry().page_tokens(), self.tile_pages());
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
        let (_, streamed) = pieces(&needs, page_size, tile_pages, missing);
        let cast = Cast { ids: ids.clone(), needs: needs.clone(), ..Cast::default() };
        for piece in streamed.iter().take(self.config.tiles_ahead as usize) {
            let pages = self.pages_of_piece(next, &cast, piece);
            let numbers: Vec<u32> = pages.iter().map(|page| page.number).collect();
            if self.resident().free_soon() < piece.missing as u64 || self.fetch(&numbers).is_err() {
                break;
            }
        }
    }
}

fn page_range(span: &Span, page_size: u32, pages: u32) -> std::ops::Range<u32> {
    pages_of(span.splits.start, page_size, pages).start..pages_of(span.splits.end - 1, page_size, pages).end
}

fn page_count(need: &Need, page_size: u32) -> u64 {
    if need.splits.is_empty() {
        return 0;
    }
    let span = Span { sequence: 0, splits: need.splits.clone() };
    page_range(&span, page_size, need.pages).len() as u64
}
