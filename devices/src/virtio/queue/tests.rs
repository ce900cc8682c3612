//! Tests of split queues.
