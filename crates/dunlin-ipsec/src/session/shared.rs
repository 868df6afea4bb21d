//! Types that a session and its thread share.

use dunlin_lane::control::ControlStream;
use dunlin_proto::ipsec::Grant;
use dunlin_proto::ipsec::Sender;
use dunlin_proto::ipsec::exchange::Exchange;
use dunlin_proto::ipsec::key::Role;
use dunlin_proto::ipsec::message::{Message, Terms};
use dunlin_proto::ipsec::plan::SessionParameters;
use dunlin_proto::negotiate::SessionId;

use crate::error::IpsecError;
use crate::event::Observer;
use crate::options::Options;

/// A command to a session's thread.
pub(super) enum Command {
    Received(Message),
    Lost(IpsecError),
    Want(Sender),
    Rekey,
    End,
}

/// The status of a session for other threads.
#[derive(Debug, Default)]
pub(super) struct SharedStatus {
    /// What both sides have agreed on.
    pub(super) parameters: Option<SessionParameters>,
    pub(super) outbound: (u32, Vec<Grant>),
    pub(super) inbound: (u32, Vec<Grant>),
    pub(super) up: bool,
}

/// The parameters of a new session.
pub(crate) struct Beginning {
    pub(crate) control: ControlStream,
    pub(crate) session: SessionId,
    pub(crate) role: Role,
    pub(crate) exchange: Exchange,
    pub(crate) options: Options,
    pub(crate) observer: Observer,
    /// Checks whether the peer may request these terms.
    pub(crate) admits: fn(&Options, &Terms) -> Result<(), IpsecError>,
}
