//! Rules on the sources and on the pages of the documentation.

mod columns;
mod docs;
mod layering;
