//! The programs that own the sockets at a channel's ends, and how the tunnel reads and
//! writes these sockets.

use dunlin_proto::stripe::{Delivery, Outcome};

use super::channel::{Over, Piece, Socket};
use super::world::{Event, World, Writing};
use crate::plan::MS;

impl World<'_> {
    pub(super) fn says(&mut self, index: usize, side: usize) {
        let socket = &mut self.channels[index].sockets[side];
        socket.says = false;
        if socket.over.is_some() {
            return;
        }
        let bytes = socket.says_now();
        socket.said += bytes;
        let (more, full, pause_ns) = (!socket.at_end(), bytes == 0, socket.talk.pause_ns);
        self.tell_readable(index, side);
        if more && !full {
            self.channels[index].sockets[side].says = true;
            self.after(pause_ns, Event::Says(index, side));
        }
    }

    /// The tunnel has read from the socket, so the program that owns the socket can send more.
    pub(super) fn says_more(&mut self, index: usize, side: usize) {
        let socket = &mut self.channels[index].sockets[side];
        if !socket.says && !socket.at_end() && socket.over.is_none() {
            socket.says = true;
            let pause_ns = socket.talk.pause_ns;
            self.after(pause_ns, Event::Says(index, side));
        }
    }

    pub(super) fn tell_readable(&mut self, index: usize, side: usize) {
        let channel = &self.channels[index];
        let socket = &channel.sockets[side];
        if let Some(number) = channel.number
            && socket.over.is_none()
            && socket.is_readable()
        {
            self.sides[side].readable(number);
        }
    }

    pub(super) fn takes(&mut self, index: usize, side: usize) {
        let stalls = self.stalls(index, side);
        let channel = &mut self.channels[index];
        let socket = &mut channel.sockets[side];
        socket.takes = false;
        if socket.over == Some(Over::Aborted) {
            return;
        }
        if !stalls {
            socket.taken = socket.written.min(socket.taken + socket.talk.bite);
        }
        if socket.taken < socket.written {
            let pause_ns = if stalls { 50 * MS } else { socket.talk.bite_ns };
            socket.takes = true;
            self.after(pause_ns, Event::Takes(index, side));
        }
        let channel = &self.channels[index];
        if let Some(number) = channel.number
            && channel.sockets[side].room() > 0
            && let Some(delivery) = self.sides[side].writable(number)
        {
            self.write(side, delivery, None);
        }
    }

    /// Whether the program on this side reads nothing. Such a program stalls until all channels
    /// without stalling programs have ended.
    pub(super) fn stalls(&self, index: usize, side: usize) -> bool {
        let stalls = |socket: &Socket| socket.talk.stalls;
        stalls(&self.channels[index].sockets[side])
            && self
                .channels
                .iter()
                .any(|channel| !channel.is_over() && !channel.sockets.iter().any(stalls))
    }

    pub(super) fn write(
        &mut self,
        side: usize,
        delivery: Delivery<Piece>,
        connection: Option<usize>,
    ) {
        let id = self.next_writing;
        self.next_writing += 1;
        let writing = Writing {
            side,
            number: delivery.channel,
            piece: delivery.token,
            connection,
        };
        self.writings.insert(id, writing);
        let for_ns = self.moment();
        self.after(for_ns, Event::Wrote(id));
    }

    pub(super) fn wrote(&mut self, id: u64) {
        let Some(writing) = self.writings.remove(&id) else {
            return;
        };
        let (side, piece) = (writing.side, writing.piece);
        self.check_piece(&writing);
        let socket = &mut self.channels[piece.channel].sockets[side];
        let room = if socket.over.is_some() {
            u64::from(piece.length)
        } else {
            socket.room()
        };
        let written = u64::from(piece.length).min(room) as u32;
        socket.written += u64::from(written);
        if !socket.takes && written > 0 {
            socket.takes = true;
            let pause_ns = socket.talk.bite_ns;
            self.after(pause_ns, Event::Takes(piece.channel, side));
        }
        let left = piece.length - written;
        let rest = (left > 0).then_some(Piece {
            at: piece.at + u64::from(written),
            length: left,
            ..piece
        });
        let next = self.sides[side].wrote(writing.number, written, rest, self.now_ns);
        match next {
            Some(delivery) => self.write(side, delivery, writing.connection),
            None => {
                if let Some(connection) = writing.connection {
                    self.reads_on(connection);
                }
            }
        }
    }

    /// Reads from a socket, for a lane's thread.
    pub(super) fn read_socket(&mut self, side: usize, number: u32, most: u32) -> Outcome<Piece> {
        let index = self.by_number[&number];
        let cap = self.random.between(1, 300_000);
        let socket = &mut self.channels[index].sockets[side];
        if socket.over.is_some() {
            return Outcome::Nothing;
        }
        let length = socket.unread().min(u64::from(most)).min(cap) as u32;
        if length == 0 {
            if socket.at_end() {
                socket.ended = true;
                return Outcome::End;
            }
            return Outcome::Nothing;
        }
        let token = Piece {
            channel: index,
            from: side,
            at: socket.read,
            length,
        };
        socket.read += u64::from(length);
        let more = socket.unread() > 0 || socket.at_end();
        self.says_more(index, side);
        Outcome::Bytes {
            length,
            token,
            more,
        }
    }
}
