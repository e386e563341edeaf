//! Is what cannot be built or done refused, with its own error?

use super::super::check::{Check, Verdict};
use super::super::store::context_bits;
use super::super::values::Tensor;
use super::twin::append;
use super::{Setup, boxed, over_tiers, split_pages};
use crate::record::Record;
use crate::swap::{HighSpeedSwap, SwapConfig};
use crate::{Backend, Dtype, Error, Geometry, PageFormat};

/// Every field of the configuration, the budget, and the tier.
pub(super) fn settings<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        for page_size in [8, 64, 256] {
            let geometry = Geometry::new(1, 2, 1, 16).page_size(page_size).format(format);
            let record = Record::new(geometry);
            let build = |config: SwapConfig| {
                let builder = HighSpeedSwap::builder(backend.clone(), geometry).config(config);
                builder.boxed_tier(boxed(kind, 8, &record)).build()
            };
            let least = (split_pages(page_size) + 1) * record.frame_stride();
            let good = SwapConfig { device_budget: least, ..SwapConfig::default() };
            check.holds("the least budget is enough", build(good).is_ok());
            let wrong: [(&str, SwapConfig); 7] = [
                ("device_budget", SwapConfig { device_budget: 0, ..good }),
                ("device_budget", SwapConfig { device_budget: least - 1, ..good }),
                ("tile_pages", SwapConfig { tile_pages: 0, ..good }),
                ("tile_pages", SwapConfig { tile_pages: (1 << 20) + 1, ..good }),
                ("tiles_ahead", SwapConfig { tiles_ahead: Some(65), ..good }),
                ("state_bytes", SwapConfig { state_bytes: 0, ..good }),
                ("device_budget", SwapConfig { device_budget: 1, ..good }),
            ];
            for (name, config) in wrong {
                let error = build(config).err();
                let named =
                    matches!(&error, Some(Error::Config { field, value, .. }) if *field == name && !value.is_empty());
                check.holds(&format!("{name} is named: {error:?}"), named);
            }
            let vast = build(SwapConfig { device_budget: u64::MAX, ..good });
            check.refused("a vast budget", vast, |error| matches!(error, Error::Limit { .. }));
            let none = HighSpeedSwap::builder(backend.clone(), geometry).config(good).build();
            check.refused("no tier", none, |error| matches!(error, Error::Config { field: "tier", .. }));
            let small = HighSpeedSwap::builder(backend.clone(), geometry).config(good);
            let small = small.boxed_tier(boxed(kind, 0, &record)).build();
            check.refused("a tier of no page", small, |error| matches!(error, Error::Config { .. }));
            let odd = Geometry::new(1, 2, 1, 16).page_size(24).format(format);
            let odd = HighSpeedSwap::builder(backend.clone(), odd).boxed_tier(boxed(kind, 8, &record)).build();
            check.refused("a page of 24 tokens", odd, |error| matches!(error, Error::Geometry { .. }));
        }
        check.done()
    })
}

/// Wrong calls give the errors of `PagedStore` and change nothing.
pub(super) fn bad_input<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    over_tiers(format, |kind| {
        let mut check = Check::default();
        let setup = Setup::new(kind, format, 16, 17).slots(30);
        let ((mut swap, _), (mut stranger, _)) = (setup.build(backend)?, setup.build(backend)?);
        let (seq, foreign) = (swap.begin(), stranger.begin());
        let kv = [1, 2].map(|seed| Tensor::normal(Dtype::F32, [300, 1, 16], seed));
        append(backend, &mut swap, 0, &[(&seq, None, 300)], &kv)??;
        let before = (context_bits(&mut swap, 0, &seq)?, swap.stats().store.held_pages);
        let unknown = |error: &Error| matches!(error, Error::UnknownSequence { .. });
        let past = |error: &Error| matches!(error, Error::OffsetPastEnd { .. });
        check.refused("append", append(backend, &mut swap, 0, &[(&foreign, None, 3)], &kv)?, unknown);
        let twice = append(backend, &mut swap, 0, &[(&seq, None, 3), (&seq, None, 3)], &kv)?;
        check.refused("named twice", twice, |error| matches!(error, Error::DuplicateSequence { .. }));
        check.refused("past the end", append(backend, &mut swap, 0, &[(&seq, Some(301), 3)], &kv)?, past);
        let layer = append(backend, &mut swap, 1, &[(&seq, None, 3)], &kv)?;
        check.refused("layer", layer, |error| matches!(error, Error::UnknownLayer { .. }));
        check.refused("too few rows", append(backend, &mut swap, 0, &[(&seq, Some(0), 301)], &kv)?, |error| {
            matches!(error, Error::OutOfBounds { .. })
        });
        check.refused("fork", swap.fork(&foreign), unknown);
        check.refused("fork_at", swap.fork_at(&seq, 301), past);
        check.refused("truncate", swap.truncate(&seq, 301), past);
        check.refused("offload", swap.offload(&foreign), unknown);
        check.refused("evict", swap.evict(&foreign), unknown);
        check.refused("pin", swap.pin(0, &foreign, 0..1), unknown);
        check.refused("unpin", swap.unpin(0, &foreign, 0..1), unknown);
        check.refused("prefetch", swap.prefetch(0, &foreign, 0..1), unknown);
        check.refused("prefetch of a layer", swap.prefetch(7, &seq, 0..1), |e| matches!(e, Error::UnknownLayer { .. }));
        check.refused("pages", swap.pages(0, &foreign), unknown);
        check.refused("context", swap.context(0, &foreign), unknown);
        check.refused("reserve", swap.reserve(&seq, 16 * 48), |error| {
            matches!(error, Error::NothingEvictable { .. } | Error::PageLimit { .. })
        });
        check.refused("preflight", swap.preflight(&[(&seq, 16 * 48)]), |e| matches!(e, Error::PageLimit { .. }));
        let after = (context_bits(&mut swap, 0, &seq)?, swap.stats().store.held_pages);
        check.holds("nothing has changed", before == after && swap.is_consistent());
        check.holds("and nothing is pinned", swap.stats().pinned_pages == 0);
        check.done()
    })
}
