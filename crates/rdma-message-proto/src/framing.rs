use crate::flow::Flow;
use crate::window::Sizes;

/// The lengths of frames and messages that the peer's receives and the settings permit, in bytes.
#[derive(Debug, Clone)]
pub struct Framing {
    sizes: Sizes,
    frame: usize,
    eager: usize,
    own_frame: usize,
    own_eager: usize,
    longest: usize,
    trailer: usize,
}

impl Framing {
    pub(crate) fn new(own_frame: usize, own_eager: usize, trailer: usize) -> Self {
        let sizes = Sizes::new(0);
        Self { sizes, frame: 0, eager: 0, own_frame, own_eager, longest: 0, trailer }
    }

    /// Returns the longest payload of a frame for receives of `size` bytes.
    #[inline]
    fn payload(&self, size: u32) -> usize {
        self.own_frame.min(size as usize).saturating_sub(self.trailer)
    }

    pub(crate) fn set_peer(&mut self, first: u32, longest: u32) {
        self.sizes = Sizes::new(first);
        self.longest = self.payload(longest);
    }

    /// Returns the longest frame for the receives announced last.
    #[inline]
    pub fn frame(&self) -> usize {
        self.frame
    }

    /// Returns the longest message in frames. Longer ones are offered.
    #[inline]
    pub fn eager(&self) -> usize {
        self.eager
    }

    pub fn longest(&self) -> usize {
        self.longest
    }

    #[inline]
    pub fn is_settled(&self) -> bool {
        self.sizes.is_settled()
    }

    pub fn sizes(&mut self) -> &mut Sizes {
        &mut self.sizes
    }

    #[inline]
    pub(crate) fn frame_len(&mut self, flow: &Flow, ahead: u32) -> usize {
        if self.sizes.is_settled() {
            return self.frame;
        }
        let next = flow.next_receive();
        self.sizes.settle(next);
        self.frame.min(self.payload(self.sizes.at(next.wrapping_add(ahead))))
    }

    /// Returns `None` if the message needs more than `most` frames, or more than the peer's
    /// receives permit.
    pub(crate) fn frames_of(&mut self, flow: &Flow, len: usize, most: usize) -> Option<usize> {
        // An empty message has a frame too.
        let mut frames = 1;
        if self.sizes.is_settled() {
            frames = len.div_ceil(self.frame).max(1);
        } else {
            let mut sent = self.frame_len(flow, 0);
            while sent < len {
                sent += self.frame_len(flow, frames as u32);
                frames += 1;
            }
        }
        let most = || most.min(flow.max_frames() as usize);
        (frames == 1 || frames <= most()).then_some(frames)
    }

    pub(crate) fn limit(&mut self, size: u32, frames: usize) {
        self.frame = self.payload(size);
        self.eager = self.frame.max(self.own_eager.min(self.frame.saturating_mul(frames)));
    }
}
