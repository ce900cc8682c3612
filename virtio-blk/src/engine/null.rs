//! Completes at once and moves no data: what is left is the cost of the path itself.

use super::{Done, Engine};
use crate::request::{Request, Status};

/// See the module.
pub(crate) struct Null;

impl Engine for Null {
    fn push(&mut self, request: Request) -> Option<Done> {
        Some(Done { request, status: Status::Ok })
    }
}
