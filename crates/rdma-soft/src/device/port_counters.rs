//! The counters of the port: sums over all queue pairs since the device was opened.

use std::array;

use crate::roce::{requester::SendCounters, responder::ReceiveCounters};

/// Named as SoftRoCE names them. Those that it lacks have the names of ConnectX, or their own.
const NAMES: [&str; 13] = [
    "sent_pkts",
    "rcvd_pkts",
    "duplicate_request",
    "out_of_seq_request",
    "send_rnr_err",
    "rcvd_rnr_err",
    "rcvd_seq_err",
    "local_ack_timeout_err",
    "retransmitted_pkts",
    "dropped_requests",
    "np_ecn_marked_roce_packets",
    "np_cnp_sent",
    "rp_cnp_handled",
];

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PortCounters([u64; NAMES.len()]);

impl PortCounters {
    /// Adds the counters of a queue pair.
    pub(crate) fn add(&mut self, (sent, received): (SendCounters, ReceiveCounters)) {
        let added = [
            sent.packets + received.replies,
            sent.responses + received.packets,
            received.duplicates,
            received.out_of_sequence,
            received.not_ready,
            sent.rnr_naks,
            sent.sequence_naks,
            sent.timeouts,
            sent.retransmitted,
            received.dropped,
            received.marked,
            received.congestion_notifications,
            sent.congestion_notifications,
        ];
        self.0 = array::from_fn(|at| self.0[at] + added[at]);
    }

    pub(crate) fn named(self) -> impl Iterator<Item = (String, u64)> {
        NAMES.into_iter().map(str::to_owned).zip(self.0)
    }
}
