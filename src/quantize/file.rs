//! How does a key calibration get into a file and back? A safetensors file with two tensors and what they must agree with.

use super::KeyCalibration;
use crate::tensor_file::{self, TensorFile};
use crate::{Geometry, Result};
use safetensors::Dtype;
use std::path::Path;

const MEAN: &str = "mean";
const SCALE: &str = "scale";

impl KeyCalibration {
    /// The calibration as a safetensors file: tensors `mean` and `scale` f32 `[layer, kv_head, k_dim]`, and metadata
    /// `version`, `layers`, `kv_heads`, `k_dim`.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let shape = || [self.layers, self.kv_heads, self.k_dim].map(|n| n as usize).to_vec();
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let (mean, scale) = (bytes(&self.mean), bytes(&self.scale));
        let numbers = [("layers", self.layers), ("kv_heads", self.kv_heads), ("k_dim", self.k_dim)];
        let tensors = [(MEAN, shape(), &mean[..]), (SCALE, shape(), &scale[..])];
        tensor_file::encode("a key calibration", Dtype::F32, &tensors, &[], &numbers)
    }

    /// Writes [`to_bytes`](Self::to_bytes) to a file.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File).
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        tensor_file::save(path.as_ref(), &self.to_bytes()?)
    }

    /// Reads a calibration for a model.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) when it is no safetensors file; [`Error::WrongFile`](crate::Error::WrongFile)
    /// with the first thing that differs from what the geometry needs; as for [`new`](Self::new) for values that no
    /// calibration has.
    pub fn load(path: impl AsRef<Path>, geometry: &Geometry) -> Result<Self> {
        let (name, bytes) = tensor_file::load(path.as_ref())?;
        Self::parse(&name, &bytes, geometry)
    }

    /// The same from the bytes of a file.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn from_bytes(bytes: &[u8], geometry: &Geometry) -> Result<Self> {
        Self::parse("a key calibration", bytes, geometry)
    }

    fn parse(name: &str, bytes: &[u8], geometry: &Geometry) -> Result<Self> {
        let geometry = geometry.validate()?;
        let file = TensorFile::parse(name, bytes)?;
        let values = |tensor| {
            let tensor = file.tensor(tensor, Dtype::F32)?;
            let [layers, heads, k_dim] = file.axes(&tensor)?;
            file.agree("layers", layers, geometry.layers())?;
            file.agree("kv_heads", heads, geometry.kv_heads())?;
            file.agree("k_dim", k_dim, geometry.k_dim())?;
            file.says(&[("layers", layers), ("kv_heads", heads), ("k_dim", k_dim)])?;
            let (four, _) = tensor.data().as_chunks::<4>();
            Ok(four.iter().map(|&four| f32::from_le_bytes(four)).collect())
        };
        KeyCalibration::new(&geometry, values(MEAN)?, values(SCALE)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    fn model() -> Geometry {
        Geometry::new(2, 4, 2, 16)
    }

    fn calibration() -> KeyCalibration {
        let mean = (0..64).map(|at| (at as f32 - 31.5) / 3.0).collect();
        KeyCalibration::new(&model(), mean, (1..65).map(|at| at as f32 / 7.0).collect()).unwrap()
    }

    #[test]
    fn what_is_saved_is_what_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.safetensors");
        for one in [calibration(), KeyCalibration::identity(&model()).unwrap()] {
            one.save(&path).unwrap();
            let again = KeyCalibration::load(&path, &model()).unwrap();
            assert_eq!((&again, again.checksum(), again.is_identity()), (&one, one.checksum(), one.is_identity()));
        }
        assert_ne!(calibration().checksum(), KeyCalibration::identity(&model()).unwrap().checksum());
        let none = KeyCalibration::load(folder.path().join("none"), &model());
        assert!(matches!(none, Err(Error::File { operation: "read", .. })));
        assert!(matches!(calibration().save(folder.path()), Err(Error::File { operation: "write", .. })));
    }

    #[test]
    fn another_model_s_and_damaged_files_are_refused() {
        let bytes = calibration().to_bytes().unwrap();
        for (other, field) in [
            (Geometry::new(3, 4, 2, 16), "layers"),
            (Geometry::new(2, 4, 4, 16), "kv_heads"),
            (Geometry::new(2, 4, 2, 24), "k_dim"),
        ] {
            let error = KeyCalibration::from_bytes(&bytes, &other).unwrap_err();
            assert!(matches!(&error, Error::WrongFile { what, .. } if *what == field), "{error}");
        }
        for cut in [0, 7, 40, bytes.len() - 1] {
            let error = KeyCalibration::from_bytes(&bytes[..cut], &model());
            assert!(matches!(error, Err(Error::File { operation: "parse", .. })));
        }
        let file = |dtype, shape: &[usize], value: f32, layers: u32| {
            let data: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), 64).flatten().collect();
            let tensors = [("mean", shape.to_vec(), &data[..]), ("scale", shape.to_vec(), &data[..])];
            let numbers = [("layers", layers), ("kv_heads", 2), ("k_dim", 16)];
            let bytes = tensor_file::encode("a test", dtype, &tensors, &[], &numbers).unwrap();
            KeyCalibration::from_bytes(&bytes, &model())
        };
        assert!(file(Dtype::F32, &[2, 2, 16], 1.0, 2).is_ok());
        for (result, field) in [
            (file(Dtype::I32, &[2, 2, 16], 1.0, 2), "dtype"),
            (file(Dtype::F32, &[4, 16], 1.0, 2), "number of axes"),
            (file(Dtype::F32, &[2, 2, 16], 1.0, 3), "layers"),
        ] {
            assert!(matches!(&result, Err(Error::WrongFile { what, .. }) if *what == field), "{field}: {result:?}");
        }
        assert!(matches!(file(Dtype::F32, &[2, 2, 16], 0.0, 2), Err(Error::Config { field: "calibration.scale", .. })));
        let basis = crate::predictor::Basis::gaussian(&model(), 16, 0).unwrap().to_bytes().unwrap();
        assert!(matches!(KeyCalibration::from_bytes(&basis, &model()), Err(Error::File { operation: "parse", .. })));
    }
}
