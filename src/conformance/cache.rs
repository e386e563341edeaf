//! What do the cases ask of a cache, whether its pages may leave the device or not?

use crate::store::{Append, ContextView, PagedStore, Query, Sequence};
use crate::swap::HighSpeedSwap;
use crate::{Backend, Geometry, Result};

/// Two tensors that belong together, as bits: K and V, or output and log-sum-exp.
pub(super) type Bits = (Vec<u32>, Vec<u32>);

/// A [`PagedStore`] or a [`HighSpeedSwap`].
pub(super) trait Cache<B: Backend> {
    fn geometry(&self) -> &Geometry;
    fn stream(&mut self) -> &mut B::Stream;
    fn append(&mut self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()>;
    fn attend(&mut self, layer: usize, query: &Query<'_, B::Buffer>) -> Result<()>;
    fn context(&mut self, layer: usize, seq: &Sequence) -> Result<ContextView<B::Buffer>>;
    fn download(&mut self, src: &B::Buffer, offset: u64, out: &mut [u8]) -> Result<()>;
}

macro_rules! cache {
    ($name:ident) => {
        impl<B: Backend> Cache<B> for $name<B> {
            fn geometry(&self) -> &Geometry {
                self.geometry()
            }

            fn stream(&mut self) -> &mut B::Stream {
                self.stream()
            }

            fn append(&mut self, layer: usize, appends: &[Append<'_, B::Buffer>]) -> Result<()> {
                self.append(layer, appends)
            }

            fn attend(&mut self, layer: usize, query: &Query<'_, B::Buffer>) -> Result<()> {
                self.attend(layer, query)
            }

            fn context(&mut self, layer: usize, seq: &Sequence) -> Result<ContextView<B::Buffer>> {
                self.context(layer, seq)
            }

            fn download(&mut self, src: &B::Buffer, offset: u64, out: &mut [u8]) -> Result<()> {
                self.download(src, offset, out)
            }
        }
    };
}

cache!(PagedStore);
cache!(HighSpeedSwap);
