//! Rules on the sources and on the pages of the documentation.

mod docs;
mod layering;
