//! Vectors and strings in shared memory.

mod growing;
mod string;
mod vec;

use growing::GrowingSlice;
pub use string::DString;
pub use vec::{ChunkMut, DVec, DVecIter};
