//! Closing a store so that its sequences outlive the process, and finding them again.

use super::HighSpeedSwap;
use super::residency::Origin;
use crate::backend::Backend;
use crate::pages::layer::LayerPages;
use crate::store::Sequence;
use crate::{Error, KeyCalibration, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// What a closed store leaves behind beside its pages.
#[derive(Debug, Serialize, Deserialize)]
struct Index {
    generation: u64,
    next_sequence: u64,
    /// Slot, generation, sequence, layer and place of every page.
    pages: Vec<(u32, u64, u64, u32, u32)>,
    sequences: Vec<Saved>,
    /// What keys were calibrated by: the bits of all means and of all scales.
    #[serde(default)]
    calibration: Option<(Vec<u32>, Vec<u32>)>,
}

/// One sequence: tokens and pages (indices into [`Index::pages`]) of every layer.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    id: u64,
    layers: Vec<(u64, Vec<u32>)>,
}

impl<B: Backend> HighSpeedSwap<B> {
    /// Writes every page of every live sequence to the tier, partial ones too, and closes it. A cache that is built over the
    /// same tier later has the sequences again: [`take_restored`](Self::take_restored).
    ///
    /// # Errors
    /// [`Error::TierFull`], [`Error::Page`], [`Error::File`]; [`Error::Unsupported`] for a tier that does not outlive the
    /// store.
    pub fn close(mut self) -> Result<()> {
        self.pump()?;
        while !self.flights.is_empty() {
            self.land_front()?;
        }
        let tables: Vec<u32> = self.store.sequences.values().flatten().flat_map(|layer| layer.table.clone()).collect();
        for page in tables {
            self.residency().complete(page);
        }
        let mut ids: Vec<u64> = self.store.sequences.keys().copied().collect();
        ids.sort_unstable();
        self.queue.clear();
        for &id in &ids {
            for layer in &self.store.sequences[&id] {
                let before = std::iter::once(None).chain(layer.table.iter().copied().map(Some));
                self.queue.extend(layer.table.iter().copied().zip(before));
            }
        }
        self.fault = None;
        let most = self.config.tile_pages as usize;
        while !self.queue.is_empty() && self.fault.is_none() && self.depart(most)? > 0 {
            self.settle(true)?;
        }
        self.settle(true)?;
        let left = self.queue.iter().filter(|(page, _)| self.resident().wants_out(*page)).count() as u64;
        if self.fault.is_some() || left > 0 {
            return Err(self.no_room(left));
        }
        let index = self.index(&ids);
        let bytes = serde_json::to_vec(&index).map_err(|error| Error::File {
            path: self.tier.name(),
            operation: "write the index",
            message: error.to_string(),
        })?;
        self.store.synchronize()?;
        self.tier.close(&self.store.pool.backend, &bytes)
    }

    fn index(&self, ids: &[u64]) -> Index {
        let mut pages = Vec::new();
        let mut places: HashMap<u32, u32> = HashMap::new();
        let sequences = ids.iter().map(|id| {
            let layers = self.store.sequences[id].iter().map(|layer| {
                let numbers = layer.table.iter().map(|&page| {
                    *places.entry(page).or_insert_with(|| {
                        let (slot, generation) = self.resident().slot(page).expect("everything was written");
                        let Origin { sequence, layer, index } = self.resident().origin(page);
                        pages.push((slot, generation, sequence, layer, index));
                        pages.len() as u32 - 1
                    })
                });
                (layer.len, numbers.collect())
            });
            Saved { id: *id, layers: layers.collect() }
        });
        let sequences = sequences.collect();
        let calibration = self.key_calibration().filter(|calibration| !calibration.is_identity());
        let calibration = calibration.map(KeyCalibration::to_bits);
        Index { generation: self.generation, next_sequence: self.store.next_sequence, pages, sequences, calibration }
    }

    /// Takes over what the tier was closed with.
    pub(super) fn restore(&mut self, bytes: &[u8]) -> Result<()> {
        let path = self.tier.name();
        let refuse = |found: String| Error::WrongFile { path, what: "index", found, expected: "an index".into() };
        let mut index: Index = match serde_json::from_slice(bytes) {
            Ok(index) => index,
            Err(error) => return Err(refuse(error.to_string())),
        };
        self.take_calibration(index.calibration.take())?;
        let layers = self.geometry().layers() as usize;
        let geometry = *self.geometry();
        let sound = |saved: &Saved| {
            saved.layers.len() == layers
                && saved.layers.iter().all(|(len, pages)| {
                    geometry.pages_for(*len) == pages.len() as u64
                        && pages.iter().all(|&page| (page as usize) < index.pages.len())
                })
        };
        if let Some(saved) = index.sequences.iter().find(|saved| !sound(saved)) {
            return Err(refuse(format!("sequence {} with pages that do not match its length", saved.id)));
        }
        let more = index.pages.len() as u64;
        self.store.pool.require(more, 0)?;
        self.store.pool.book.extend(u32::try_from(more).unwrap_or(u32::MAX));
        let mut numbers = Vec::with_capacity(index.pages.len());
        for &(slot, generation, sequence, layer, at) in &index.pages {
            if !self.tier.claim(slot) {
                return Err(refuse(format!("slot {slot} twice or past the end")));
            }
            let number = self.store.pool.book.take(None).expect("extended above");
            self.residency().restore(number, Origin { sequence, layer, index: at }, slot, generation);
            numbers.push(number);
        }
        self.generation = index.generation;
        for saved in index.sequences {
            let tables = saved.layers.into_iter().map(|(len, pages)| {
                let table: Vec<u32> = pages.into_iter().map(|page| numbers[page as usize]).collect();
                table.iter().for_each(|&page| self.store.pool.book.retain(page));
                let dirty = 0..table.len();
                LayerPages { table, len, dirty, ..LayerPages::default() }
            });
            let tables = tables.collect();
            self.restored.push(self.store.insert_as(saved.id, tables));
        }
        self.store.next_sequence = self.store.next_sequence.max(index.next_sequence);
        // The tables own the pages now.
        numbers.into_iter().for_each(|page| self.store.pool.give(page));
        self.reap();
        Ok(())
    }

    /// Takes over what the keys in the tier are calibrated by; [`Error::WrongFile`] where something else was given. No
    /// calibration is the same as the one that changes nothing.
    fn take_calibration(&mut self, stored: Option<(Vec<u32>, Vec<u32>)>) -> Result<()> {
        let wrong = |found, expected| {
            let (path, what) = (self.tier.name(), "key calibration");
            Error::WrongFile { path, what, found, expected }
        };
        let stored = stored.map(|bits| KeyCalibration::from_bits(self.geometry(), bits)).transpose();
        let stored = stored.map_err(|error| wrong(error.to_string(), "a calibration of this geometry".into()))?;
        let given = self.key_calibration();
        if given.filter(|given| !given.is_identity()) == stored.as_ref() {
            return Ok(());
        }
        match (given, stored) {
            (None, Some(stored)) => self.store.calibrate_keys(stored),
            (given, stored) => {
                let name = |calibration: Option<&KeyCalibration>| match calibration {
                    Some(calibration) if !calibration.is_identity() => format!("{:#018x}", calibration.checksum()),
                    _ => "none".into(),
                };
                Err(wrong(name(stored.as_ref()), name(given)))
            }
        }
    }

    /// What keys are centred and scaled by before they are quantised: as given to the builder, or found in the tier.
    pub fn key_calibration(&self) -> Option<&KeyCalibration> {
        self.store.key_calibration()
    }

    /// The sequences of the store that closed the tier, with the numbers ([`Sequence::id`]) that they had there. Those not
    /// taken are given back when the cache is dropped.
    pub fn take_restored(&mut self) -> Vec<Sequence> {
        std::mem::take(&mut self.restored)
    }
}
