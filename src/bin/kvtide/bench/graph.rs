//! How is a decode step captured? On CUDA, from a stream of the bench's own; nothing else has graphs.

#[cfg(feature = "cuda")]
mod cuda {
    use anyhow::{Context, bail};
    use kvtide::Device;
    use kvtide::backend::DeviceStream;
    use kvtide::backend::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
    use kvtide::backend::cuda::cudarc::driver::{CudaGraph, CudaStream};
    use std::sync::Arc;

    /// A stream that can be captured.
    #[derive(Debug)]
    pub(in super::super) struct Recorder(Arc<CudaStream>);

    /// What was captured.
    pub(in super::super) struct Graph(CudaGraph);

    impl Recorder {
        /// The stream, and the same one for a store that is dropped before it.
        pub(in super::super) fn new(device: &Device) -> anyhow::Result<(Self, DeviceStream)> {
            let Device::Cuda(cuda) = device else { bail!("only CUDA has graphs") };
            let stream = cuda.context().new_stream()?;
            // SAFETY: the stream is of the backend's context, and outlives the store by the caller's order of fields.
            let wrapped = unsafe { cuda.wrap_stream(stream.cu_stream()) }?;
            Ok((Recorder(stream), DeviceStream::Cuda(wrapped)))
        }

        /// Captures calls on the stream.
        pub(in super::super) fn capture(&self, calls: impl FnOnce() -> kvtide::Result<()>) -> anyhow::Result<Graph> {
            self.0.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
            let called = calls();
            let graph = self.0.end_capture(CUgraphInstantiate_flags(0));
            called?;
            graph?.map(Graph).context("nothing was captured")
        }
    }

    impl Graph {
        pub(in super::super) fn launch(&self) -> anyhow::Result<()> {
            Ok(self.0.launch()?)
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod none {
    use kvtide::Device;
    use kvtide::backend::DeviceStream;

    /// There is none.
    #[derive(Debug)]
    pub(in super::super) enum Recorder {}

    /// There is none.
    pub(in super::super) enum Graph {}

    impl Recorder {
        pub(in super::super) fn new(_: &Device) -> anyhow::Result<(Self, DeviceStream)> {
            anyhow::bail!("only CUDA has graphs, and this is built without the feature `cuda`")
        }

        pub(in super::super) fn capture(&self, _: impl FnOnce() -> kvtide::Result<()>) -> anyhow::Result<Graph> {
            match *self {}
        }
    }

    impl Graph {
        pub(in super::super) fn launch(&self) -> anyhow::Result<()> {
            match *self {}
        }
    }
}

#[cfg(feature = "cuda")]
pub(super) use cuda::{Graph, Recorder};
#[cfg(not(feature = "cuda"))]
pub(super) use none::{Graph, Recorder};
