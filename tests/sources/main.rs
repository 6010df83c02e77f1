//! Rules on the sources and on the pages of the documentation.

mod columns;
mod cycles;
mod docs;
mod layering;
mod miri;
